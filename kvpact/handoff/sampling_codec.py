"""How tokens are picked and why a sequence ends, from and to protobuf."""

from __future__ import annotations

from kvpact.handoff import codec_fields as fields
from kvpact.handoff.codec_fields import EnumCodec, join
from kvpact.types import FinishReason, Sampling
from kvpact.v1 import prefill_pb2

FINISH_REASONS = EnumCodec(prefill_pb2.FinishReason, "FINISH_REASON", FinishReason)
ONLY_CHOICE = 0


def encode_sampling(sampling: Sampling, *, original_prompt_tokens: int) -> prefill_pb2.SamplingState:
    """Greedy sampling of one choice."""
    return prefill_pb2.SamplingState(
        temperature=0.0,
        stop_token_ids=sorted(sampling.stop_token_ids),
        ignore_eos=sampling.ignore_eos,
        max_output_tokens=sampling.max_output_tokens,
        choice=ONLY_CHOICE,
        original_prompt_tokens=original_prompt_tokens,
    )


def decode_sampling(message: prefill_pb2.SamplingState, path: str = "sampling") -> tuple[Sampling, int]:
    """Sampling and the length of the original prompt.

    Raises:
        BadRequest: a field is unset, or asks for what isn't greedy.
    """
    temperature = fields.number(message, "temperature", path, positive=False)
    if temperature != 0:
        raise fields.refusal(join(path, "temperature"), f"is {temperature:g}; only 0 (greedy) is served")
    choice = fields.integer(message, "choice", path, least=0)
    if choice != ONLY_CHOICE:
        raise fields.refusal(join(path, "choice"), f"is {choice}; one choice is served")
    sampling = Sampling(
        max_output_tokens=fields.integer(message, "max_output_tokens", path, least=1),
        stop_token_ids=frozenset(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
    )
    return sampling, fields.integer(message, "original_prompt_tokens", path, least=1)


def encode_finish_reason(reason: FinishReason | None) -> prefill_pb2.FinishReason:
    """Reason as a number; UNSPECIFIED while the sequence goes on."""
    return FINISH_REASONS.encode_optional(reason)


def decode_finish_reason(number: int, path: str = "finish_reason") -> FinishReason | None:
    """Reason from a number; None while the sequence goes on."""
    return FINISH_REASONS.decode_optional(number, path)
