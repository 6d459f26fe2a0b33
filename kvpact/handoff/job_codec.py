"""Orders to workers and their answers from and to protobuf."""

from __future__ import annotations

from kvpact.handoff import codec_fields as fields
from kvpact.handoff.canary_codec import decode_canary, encode_canary
from kvpact.handoff.codec_fields import join
from kvpact.handoff.jobs import (
    Committed,
    DecodedTokens,
    DecodeJob,
    FirstToken,
    GenerateJob,
    Paired,
    Partner,
    PrefillEvent,
    PrefillJob,
    Reserved,
)
from kvpact.handoff.sampling_codec import (
    decode_finish_reason,
    decode_sampling,
    encode_finish_reason,
    encode_sampling,
)
from kvpact.handoff.terms_codec import decode_tokens
from kvpact.handoff.transport_codec import decode_choice, encode_choice
from kvpact.handoff.verdict_codec import EXACTNESSES, decode_verdict, encode_verdict
from kvpact.handoff.worker_codec import decode_handoff_id, decode_life, encode_life
from kvpact.types import Sampling
from kvpact.v1 import decode_pb2, handoff_pb2, prefill_pb2


def encode_connect(partner: Partner) -> prefill_pb2.ConnectRequest:
    """Order to pair with a decode worker as a message."""
    return prefill_pb2.ConnectRequest(decode_endpoint=partner.endpoint, decode=encode_life(partner.life))


def decode_connect(message: prefill_pb2.ConnectRequest) -> Partner:
    """Decode worker to pair with from a message."""
    return _decode_partner(message.decode, message.decode_endpoint)


def encode_paired(paired: Paired) -> prefill_pb2.ConnectResponse:
    """How a pairing went as a message."""
    return prefill_pb2.ConnectResponse(
        verdict=encode_verdict(paired.verdict),
        canary=encode_canary(paired.canary),
        transport=encode_choice(paired.transport),
    )


def decode_paired(message: prefill_pb2.ConnectResponse) -> Paired:
    """How a pairing went from a message."""
    return Paired(
        verdict=decode_verdict(message.verdict),
        canary=decode_canary(message.canary),
        transport=decode_choice(message),
    )


def encode_prefill_job(job: PrefillJob) -> prefill_pb2.PrefillRequest:
    """Order to compute a prompt as a message."""
    partner = job.decode
    return prefill_pb2.PrefillRequest(
        handoff_id=job.handoff_id,
        prefill=encode_life(job.prefill),
        decode=encode_life(partner.life) if partner else None,
        decode_endpoint=partner.endpoint if partner else "",
        token_ids=job.token_ids,
        table_length_tokens=job.table_length,
        sampling=encode_sampling(job.sampling, original_prompt_tokens=job.original_prompt_tokens),
        request_id=job.request_id,
    )


def decode_prefill_job(message: prefill_pb2.PrefillRequest) -> PrefillJob:
    """Order to compute a prompt from a message."""
    token_ids, original_prompt_tokens, sampling = _decode_prompt(message)
    partner = _decode_partner(message.decode, message.decode_endpoint) if message.HasField("decode") else None
    return PrefillJob(
        handoff_id=decode_handoff_id(message.handoff_id),
        prefill=decode_life(message.prefill, "prefill"),
        decode=partner,
        token_ids=token_ids,
        original_prompt_tokens=original_prompt_tokens,
        table_length=message.table_length_tokens,
        sampling=sampling,
        request_id=message.request_id,
    )


def encode_prefill_event(event: PrefillEvent) -> prefill_pb2.PrefillResponse:
    """One event of a prefill as a message."""
    match event:
        case Reserved():
            reserved = prefill_pb2.ReservedEvent(held_prefix_tokens=event.held_prefix_tokens)
            return prefill_pb2.PrefillResponse(reserved=reserved)
        case Committed():
            committed = prefill_pb2.CommittedEvent(
                payload_bytes=event.payload_bytes,
                exactness=EXACTNESSES.encode(event.exactness),
                max_abs_error=event.max_abs_error,
                handoff_s=event.handoff_s,
                exposed_s=event.exposed_s,
            )
            return prefill_pb2.PrefillResponse(committed=committed)
        case FirstToken():
            finish_reason = encode_finish_reason(event.finish_reason)
            first_token = prefill_pb2.FirstTokenEvent(token_id=event.token_id, finish_reason=finish_reason)
            return prefill_pb2.PrefillResponse(first_token=first_token)


def decode_prefill_event(message: prefill_pb2.PrefillResponse) -> PrefillEvent:
    """One event of a prefill from a message; refuses one without content."""
    match message.WhichOneof("event"):
        case "reserved":
            held = fields.integer(message.reserved, "held_prefix_tokens", "reserved", least=0)
            return Reserved(held_prefix_tokens=held)
        case "committed":
            return _decode_committed(message.committed)
        case "first_token":
            return FirstToken(
                token_id=fields.integer(message.first_token, "token_id", "first_token", least=0),
                finish_reason=decode_finish_reason(message.first_token.finish_reason),
            )
        case _:
            raise fields.refusal("event", "is absent")


def encode_decode_job(job: DecodeJob) -> decode_pb2.DecodeRequest:
    """Order to decode as a message."""
    return decode_pb2.DecodeRequest(
        handoff_id=job.handoff_id,
        decode=encode_life(job.decode),
        token_ids=job.token_ids,
        sampling=encode_sampling(job.sampling, original_prompt_tokens=job.original_prompt_tokens),
        request_id=job.request_id,
    )


def decode_decode_job(message: decode_pb2.DecodeRequest) -> DecodeJob:
    """Order to decode from a message."""
    sampling, original_prompt_tokens = decode_sampling(message.sampling, fields.part(message, "sampling", ""))
    return DecodeJob(
        handoff_id=decode_handoff_id(message.handoff_id, "handoff_id"),
        decode=decode_life(message.decode, fields.part(message, "decode", "")),
        token_ids=decode_tokens(message.token_ids, "token_ids"),
        sampling=sampling,
        original_prompt_tokens=original_prompt_tokens,
        request_id=message.request_id,
    )


def encode_generate_job(job: GenerateJob) -> decode_pb2.GenerateRequest:
    """Order to compute and decode a prompt as a message."""
    return decode_pb2.GenerateRequest(
        decode=encode_life(job.decode),
        token_ids=job.token_ids,
        table_length_tokens=job.table_length,
        sampling=encode_sampling(job.sampling, original_prompt_tokens=job.original_prompt_tokens),
        request_id=job.request_id,
    )


def decode_generate_job(message: decode_pb2.GenerateRequest) -> GenerateJob:
    """Order to compute and decode a prompt from a message."""
    token_ids, original_prompt_tokens, sampling = _decode_prompt(message)
    return GenerateJob(
        decode=decode_life(message.decode, fields.part(message, "decode", "")),
        token_ids=token_ids,
        original_prompt_tokens=original_prompt_tokens,
        table_length=message.table_length_tokens,
        sampling=sampling,
        request_id=message.request_id,
    )


def encode_decoded_tokens(tokens: DecodedTokens) -> decode_pb2.DecodeResponse:
    """Output tokens of a handoff as a message."""
    return decode_pb2.DecodeResponse(
        token_ids=tokens.token_ids, finish_reason=encode_finish_reason(tokens.finish_reason)
    )


def encode_generated_tokens(tokens: DecodedTokens) -> decode_pb2.GenerateResponse:
    """Output tokens of a prompt that wasn't handed over as a message."""
    return decode_pb2.GenerateResponse(
        token_ids=tokens.token_ids, finish_reason=encode_finish_reason(tokens.finish_reason)
    )


def decode_decoded_tokens(message: decode_pb2.DecodeResponse | decode_pb2.GenerateResponse) -> DecodedTokens:
    """Output tokens from either message."""
    return DecodedTokens(
        token_ids=tuple(message.token_ids), finish_reason=decode_finish_reason(message.finish_reason)
    )


def _decode_partner(life: handoff_pb2.Incarnation, endpoint: str) -> Partner:
    return Partner(life=decode_life(life, "decode"), endpoint=fields.endpoint(endpoint, "decode_endpoint"))


def _decode_prompt(
    message: prefill_pb2.PrefillRequest | decode_pb2.GenerateRequest,
) -> tuple[tuple[int, ...], int, Sampling]:
    """Tokens, length of the original prompt and sampling of an order, which agree with each other."""
    sampling, original_prompt_tokens = decode_sampling(message.sampling, fields.part(message, "sampling", ""))
    token_ids = decode_tokens(message.token_ids, "token_ids")
    holds = f"token_ids holds {len(token_ids)}"
    if original_prompt_tokens > len(token_ids):
        field = join("sampling", "original_prompt_tokens")
        raise fields.refusal(field, f"is {original_prompt_tokens}; {holds}")
    if message.table_length_tokens < len(token_ids):
        raise fields.refusal("table_length_tokens", f"is {message.table_length_tokens}; {holds}")
    return token_ids, original_prompt_tokens, sampling


def _decode_committed(message: prefill_pb2.CommittedEvent, path: str = "committed") -> Committed:
    return Committed(
        payload_bytes=fields.integer(message, "payload_bytes", path, least=0),
        exactness=EXACTNESSES.decode(message.exactness, join(path, "exactness")),
        handoff_s=fields.number(message, "handoff_s", path, positive=False),
        exposed_s=fields.number(message, "exposed_s", path, positive=False),
        max_abs_error=fields.optional_number(message, "max_abs_error", path, positive=False),
    )
