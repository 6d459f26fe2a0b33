"""Independent references: transformers' own greedy generation in float32, with the logits of every step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM


@dataclass(frozen=True, slots=True, kw_only=True)
class Golden:
    """Tokens that transformers generates and the logits [steps, vocabulary] that it picked them from."""

    token_ids: tuple[int, ...]
    logits_NV: torch.Tensor


@lru_cache(maxsize=4)
def _model(folder: Path) -> AutoModelForCausalLM:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.inference_mode()
def golden(folder: Path, prompt: tuple[int, ...], max_tokens: int) -> Golden:
    """`max_tokens` greedy tokens after `prompt`, end tokens ignored, by transformers' own generate."""
    model = _model(folder)
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=max_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return Golden(
        token_ids=tuple(output.sequences[0, len(prompt) :].tolist()),
        logits_NV=torch.stack([step[0] for step in output.logits]),
    )
