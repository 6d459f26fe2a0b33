"""Orders to workers and their answers survive the wire, and what can't be meant is refused by name."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvpact.errors import BadRequest
from kvpact.handoff import codec
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
from kvpact.handoff.messages import CanaryOutcome
from kvpact.types import Exactness, FinishReason, HandoffId, Sampling
from kvpact.v1 import decode_pb2, prefill_pb2
from tests.coordinator_fakes import make_life, make_verdict

SAMPLING = Sampling(max_output_tokens=9, stop_token_ids=frozenset({4, 2}), ignore_eos=True)
PARTNER = Partner(life=make_life("decode-0"), endpoint="10.0.0.2:5")
PREFILL = PrefillJob(
    handoff_id=HandoffId(b"h" * 16),
    prefill=make_life("prefill-0"),
    decode=PARTNER,
    token_ids=(0, 7, 8),
    original_prompt_tokens=2,
    table_length=11,
    sampling=SAMPLING,
    request_id="r",
)
DECODE = DecodeJob(
    handoff_id=HandoffId(b"h" * 16),
    decode=make_life("decode-0"),
    token_ids=(0, 7, 8),
    sampling=SAMPLING,
    original_prompt_tokens=2,
    request_id="r",
)
GENERATE = GenerateJob(
    decode=make_life("decode-0"),
    token_ids=(0, 7, 8),
    original_prompt_tokens=2,
    table_length=11,
    sampling=SAMPLING,
    request_id="r",
)
COMMITTED = Committed(
    payload_bytes=12, exactness=Exactness.LOSSY, handoff_s=0.5, exposed_s=0.25, max_abs_error=0.125
)


TOKENS = DecodedTokens(token_ids=(0, 5), finish_reason=FinishReason.STOP)
GOLDEN = json.loads((Path(__file__).parent / "golden" / "jobs_v1.json").read_text())
MESSAGES = {
    "connect": (PARTNER, codec.encode_connect, codec.decode_connect),
    "prefill_job": (PREFILL, codec.encode_prefill_job, codec.decode_prefill_job),
    "generate_job": (GENERATE, codec.encode_generate_job, codec.decode_generate_job),
    "generated_tokens": (TOKENS, codec.encode_generated_tokens, codec.decode_decoded_tokens),
    "reserved": (Reserved(held_prefix_tokens=32), codec.encode_prefill_event, codec.decode_prefill_event),
    "committed": (COMMITTED, codec.encode_prefill_event, codec.decode_prefill_event),
    "first_token": (
        FirstToken(token_id=0, finish_reason=FinishReason.LENGTH),
        codec.encode_prefill_event,
        codec.decode_prefill_event,
    ),
}
"""Name -> value, and how it becomes a message and a value again."""


@pytest.mark.parametrize("name", MESSAGES)
def test_bytes_of_a_message_are_the_golden_ones(name: str) -> None:
    value, encode, decode = MESSAGES[name]
    message = encode(value)
    assert message.SerializeToString(deterministic=True).hex() == GOLDEN[name]
    assert decode(type(message).FromString(bytes.fromhex(GOLDEN[name]))) == value


@pytest.mark.parametrize("job", [PREFILL, replace(PREFILL, decode=None)])
def test_an_order_to_prefill_survives_the_wire(job: PrefillJob) -> None:
    assert codec.decode_prefill_job(codec.encode_prefill_job(job)) == job


def test_the_other_orders_survive_the_wire() -> None:
    assert codec.decode_decode_job(codec.encode_decode_job(DECODE)) == DECODE
    assert codec.decode_generate_job(codec.encode_generate_job(GENERATE)) == GENERATE
    assert codec.decode_connect(codec.encode_connect(PARTNER)) == PARTNER


@pytest.mark.parametrize(
    "event",
    [
        Reserved(held_prefix_tokens=0),
        Reserved(held_prefix_tokens=32),
        COMMITTED,
        replace(COMMITTED, exactness=Exactness.BIT_EXACT, max_abs_error=None),
        FirstToken(token_id=0, finish_reason=None),
        FirstToken(token_id=5, finish_reason=FinishReason.STOP),
    ],
)
def test_every_event_of_a_prefill_survives_the_wire(event: PrefillEvent) -> None:
    assert codec.decode_prefill_event(codec.encode_prefill_event(event)) == event


@pytest.mark.parametrize(
    "paired",
    [
        Paired(verdict=make_verdict()),
        Paired(verdict=make_verdict(), canary=CanaryOutcome(passed=True, max_abs_error=1e-6, tolerance=1e-4)),
    ],
)
def test_how_a_pairing_went_survives_the_wire(paired: Paired) -> None:
    assert codec.decode_paired(codec.encode_paired(paired)) == paired


@pytest.mark.parametrize("encode", [codec.encode_decoded_tokens, codec.encode_generated_tokens])
@pytest.mark.parametrize("reason", [None, FinishReason.LENGTH])
def test_output_tokens_survive_either_message(
    encode: Callable[..., Any], reason: FinishReason | None
) -> None:
    tokens = DecodedTokens(token_ids=(0, 5), finish_reason=reason)
    assert codec.decode_decoded_tokens(encode(tokens)) == tokens


Damage = Callable[[Any], object]
"""Changes a message in place."""

PROMPT_DAMAGES: list[tuple[str, Damage]] = [
    ("sampling", lambda order: order.ClearField("sampling")),
    ("token_ids", lambda order: order.ClearField("token_ids")),
    ("token_ids", lambda order: order.token_ids.append(-1)),
    ("sampling.max_output_tokens", lambda order: order.sampling.ClearField("max_output_tokens")),
    ("sampling.choice", lambda order: order.sampling.ClearField("choice")),
    ("sampling.temperature", lambda order: setattr(order.sampling, "temperature", math.nan)),
    ("sampling.original_prompt_tokens", lambda order: order.sampling.ClearField("original_prompt_tokens")),
    ("sampling.original_prompt_tokens", lambda order: setattr(order.sampling, "original_prompt_tokens", 4)),
    ("table_length_tokens", lambda order: order.ClearField("table_length_tokens")),
    ("table_length_tokens", lambda order: setattr(order, "table_length_tokens", 2)),
    ("table_length_tokens", lambda order: setattr(order, "table_length_tokens", -5)),
]


@pytest.mark.parametrize(("param", "damage"), PROMPT_DAMAGES)
@pytest.mark.parametrize("kind", ["prefill", "generate"])
def test_a_prompt_that_cannot_be_meant_is_refused_by_field(kind: str, param: str, damage: Damage) -> None:
    encoded, decode = {
        "prefill": (codec.encode_prefill_job(PREFILL), codec.decode_prefill_job),
        "generate": (codec.encode_generate_job(GENERATE), codec.decode_generate_job),
    }[kind]
    decode(encoded)
    damage(encoded)
    with pytest.raises(BadRequest) as refusal:
        decode(encoded)
    assert refusal.value.param == param


@pytest.mark.parametrize(
    ("param", "damage"),
    [
        ("decode", lambda order: order.ClearField("decode")),
        ("decode.worker", lambda order: order.decode.ClearField("worker")),
        ("decode.incarnation", lambda order: setattr(order.decode, "incarnation", b"short")),
    ],
)
def test_an_order_to_generate_names_one_life(param: str, damage: Damage) -> None:
    encoded = codec.encode_generate_job(GENERATE)
    damage(encoded)
    with pytest.raises(BadRequest) as refusal:
        codec.decode_generate_job(encoded)
    assert refusal.value.param == param


@pytest.mark.parametrize("order", [codec.encode_prefill_job(PREFILL), codec.encode_connect(PARTNER)])
def test_a_partner_without_an_endpoint_is_refused(order: Any) -> None:
    order.ClearField("decode_endpoint")
    is_connect = isinstance(order, prefill_pb2.ConnectRequest)
    with pytest.raises(BadRequest, match="decode_endpoint"):
        (codec.decode_connect if is_connect else codec.decode_prefill_job)(order)


@pytest.mark.parametrize(
    ("param", "event"),
    [
        ("event", prefill_pb2.PrefillResponse()),
        ("first_token.token_id", prefill_pb2.PrefillResponse(first_token=prefill_pb2.FirstTokenEvent())),
        (
            "first_token.token_id",
            prefill_pb2.PrefillResponse(first_token=prefill_pb2.FirstTokenEvent(token_id=-1)),
        ),
        ("committed.exactness", prefill_pb2.PrefillResponse(committed=prefill_pb2.CommittedEvent())),
        (
            "committed.payload_bytes",
            prefill_pb2.PrefillResponse(committed=prefill_pb2.CommittedEvent(payload_bytes=-1)),
        ),
        (
            "committed.handoff_s",
            prefill_pb2.PrefillResponse(
                committed=prefill_pb2.CommittedEvent(exactness=1, handoff_s=math.inf)  # type: ignore[arg-type]
            ),
        ),
        (
            "reserved.held_prefix_tokens",
            prefill_pb2.PrefillResponse(reserved=prefill_pb2.ReservedEvent(held_prefix_tokens=-1)),
        ),
        (
            "finish_reason",
            prefill_pb2.PrefillResponse(
                first_token=prefill_pb2.FirstTokenEvent(token_id=1, finish_reason=99)  # type: ignore[arg-type]
            ),
        ),
    ],
)
def test_an_event_that_cannot_be_meant_is_refused_by_field(
    param: str, event: prefill_pb2.PrefillResponse
) -> None:
    with pytest.raises(BadRequest) as refusal:
        codec.decode_prefill_event(event)
    assert refusal.value.param == param


def test_an_unknown_finish_reason_is_refused() -> None:
    message = decode_pb2.GenerateResponse(token_ids=[1], finish_reason=99)  # type: ignore[arg-type]
    with pytest.raises(BadRequest, match="finish_reason"):
        codec.decode_decoded_tokens(message)
