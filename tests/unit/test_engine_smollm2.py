"""The real checkpoint: the engine's tokens and logits are those of transformers."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvpact.engine.weights import resolve_model
from tests.fakes import load_engine, make_request, run_by_hand

TEXTS = (
    "The capital of France is",
    "def fibonacci(n):",
    "Q",
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
    "Once upon a time there was a small town by the sea, and in it lived a clockmaker. " * 12,
)
TOKENS = 64


@pytest.mark.timeout(300)
def test_five_prompts_of_smollm2_equal_transformers_token_for_token() -> None:
    folder = resolve_model("smollm2")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = [tuple(tokenizer(text).input_ids) for text in TEXTS]
    found = run_by_hand(load_engine(folder), *(make_request(prompt, TOKENS) for prompt in prompts))
    model = AutoModelForCausalLM.from_pretrained(folder)
    for prompt, ours in zip(prompts, found, strict=True):
        whole = torch.tensor([[*prompt, *ours.token_ids]])
        with torch.inference_mode():
            logits = model(whole, use_cache=False).logits[0, len(prompt) - 1 : -1]
        assert ours.token_ids == logits.argmax(dim=-1).tolist()
        assert (ours.logits - logits).abs().max() < 1e-4
    assert "Paris" in tokenizer.decode(found[0].token_ids)
    assert "Paris" in tokenizer.decode(found[3].token_ids)
