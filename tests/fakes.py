"""Tiny seeded models saved as folders that every loader reads, and engines on them driven by hand."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from kvpact.config import CacheConfig, EngineConfig
from kvpact.contract.identity import NO_IDENTITY
from kvpact.contract.identity_model import model_identity
from kvpact.contract.sources.huggingface import override_config, read_config
from kvpact.engine.engine import Engine
from kvpact.engine.requests import EngineEvent, EngineSettings, SequenceRequest, TokenComputed
from kvpact.types import FinishReason, Sampling, SequenceId

# Models this small lose more to a second thread than they gain.
torch.set_num_threads(1)

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS_TOKEN_ID = 0
VOCAB_SIZE = 259
"""3 special tokens and 256 bytes, all of which the tokenizer has."""
LLAMA3_SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tiny_config(
    *,
    model_type: str = "llama",
    rope: str = "default",
    theta: float = 10000.0,
    layers: int = 2,
    kv_heads: int = 2,
    context: int = 4096,
    **facts: Any,
) -> Any:
    """A transformers config: hidden 64, 4 query heads of 16 lanes; `facts` are set over it."""
    parameters: dict[str, Any] = {"rope_type": rope, "rope_theta": theta}
    if rope == "llama3":
        parameters |= LLAMA3_SCALING
    return AutoConfig.for_model(
        model_type,
        **{
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "num_key_value_heads": kv_heads,
            "head_dim": 16,
            "vocab_size": VOCAB_SIZE,
            "max_position_embeddings": context,
            "rope_parameters": parameters,
            "initializer_range": 0.15,
            "bos_token_id": EOS_TOKEN_ID,
            "eos_token_id": EOS_TOKEN_ID,
            "pad_token_id": None,
            "tie_word_embeddings": False,
        }
        | facts,
    )


def make_tiny_model(
    folder: Path, *, model_type: str = "llama", rope: str = "default", seed: int = 0, **facts: Any
) -> Path:
    """Saves a model with weights drawn from `seed` into `folder`, made if missing, and gives the folder back.

    `facts` are keywords of make_tiny_config or fields of the model's config.
    """
    config = make_tiny_config(model_type=model_type, rope=rope, **facts)
    generator_state = torch.get_rng_state()
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(0.5 + torch.rand_like(parameter))
    torch.set_rng_state(generator_state)
    model.save_pretrained(folder)
    make_tiny_tokenizer().save_pretrained(folder)
    return folder


def make_tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level tokenizer with a chat template, no merges: ids 0 to 2 are special, then one id a byte."""
    vocab = {token: index for index, token in enumerate(SPECIAL_TOKENS)}
    for character in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab[character] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=SPECIAL_TOKENS[0], bos_token=SPECIAL_TOKENS[0]
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def prompt_of(length: int, *, seed: int = 0) -> tuple[int, ...]:
    """`length` ordinary token ids drawn from `seed`."""
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return tuple(torch.randint(len(SPECIAL_TOKENS), 259, (length,), generator=generator).tolist())


def engine_settings(
    folder: Path, *, override: dict[str, Any] | None = None, context: int | None = None, **settings: Any
) -> EngineSettings:
    """Settings of an engine on `folder`; `settings` are fields of CacheConfig and EngineConfig."""
    cache = {name: value for name, value in settings.items() if name in CacheConfig.model_fields}
    computing = {name: value for name, value in settings.items() if name not in cache}
    return EngineSettings(
        model_folder=folder,
        override=override or {},
        cache=CacheConfig(**cache),
        engine=EngineConfig(**computing),
        max_model_len=context,
        identity=NO_IDENTITY,
    )


def load_engine(folder: Path, **settings: Any) -> Engine:
    """An engine with engine_settings, not started."""
    return Engine.load(engine_settings(folder, **settings))


def identified_engine(folder: Path, **settings: Any) -> Engine:
    """As load_engine, with the model's identity: what a running worker has."""
    chosen = engine_settings(folder, **settings)
    config = override_config(read_config(folder), chosen.override)
    return Engine.load(replace(chosen, identity=model_identity(folder, config)))


def make_request(token_ids: Iterable[int], max_tokens: int = 8, **facts: Any) -> SequenceRequest:
    """A greedy request that ignores end tokens and wants logits; `facts` are set over it."""
    return SequenceRequest(
        **{
            "token_ids": tuple(token_ids),
            "sampling": Sampling(max_output_tokens=max_tokens, ignore_eos=True),
            "table_length": 4096,
            "want_logits": True,
        }
        | facts
    )


@dataclass
class Collected:
    """Events of one sequence, in order."""

    events: list[EngineEvent] = field(default_factory=list)
    sequence_id: SequenceId | None = None

    @property
    def token_ids(self) -> list[int]:
        """Output tokens so far."""
        return [event.token_id for event in self.events if isinstance(event, TokenComputed)]

    @property
    def logits(self) -> torch.Tensor:
        """Logits [tokens, vocabulary]."""
        found = [event.logits for event in self.events if isinstance(event, TokenComputed)]
        return torch.stack([logits for logits in found if logits is not None])

    @property
    def finish_reason(self) -> FinishReason | None:
        """Finish reason of the last token."""
        last = self.events[-1]
        return last.finish_reason if isinstance(last, TokenComputed) else None


def submit(engine: Engine, request: SequenceRequest) -> Collected:
    """Submits and gives the list its events land in."""
    collected = Collected()
    collected.sequence_id = engine.submit(request, collected.events.append)
    return collected


def run_by_hand(engine: Engine, *requests: SequenceRequest) -> list[Collected]:
    """Runs requests together on the calling thread, until nothing is left; the engine wasn't started."""
    collected = [submit(engine, request) for request in requests]
    while engine.step():
        pass
    return collected
