"""The codec: each message has fixed bytes and comes back as it went; what is unset is refused by name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from kvpact.errors import BadRequest, DataLoss
from kvpact.handoff import codec
from kvpact.v1 import decode_pb2
from tests.handoff_samples import SAMPLES, full_chunk, full_contract, full_terms, full_verdict

GOLDEN = json.loads((Path(__file__).parent / "golden" / "messages_v1.json").read_text())
UNKNOWN = 99
ZERO_IS_A_VALUE = {
    "minor",
    "rotary_dim",
    "lane_offset",
    "tensor_parallel_rank",
    "head_start",
    "layer_start",
    "start",
    "slot_start",
    "group",
    "next_position",
    "alpha",
    "scale",
    "bound_epsilons",
}
"""Numbers whose zero means zero; any other number that is zero counts as absent."""
ABSENT_IS_A_VALUE = {"window_tokens", "softcap", "upper_length_tokens", "slot_start", "bound_epsilons"}
NONE_IS_A_VALUE = {"granularity", "scale_source"}
MESSAGES = {
    "contract": (codec.encode_contract(full_contract()), codec.decode_contract),
    "verdict": (codec.encode_verdict(full_verdict()), codec.decode_verdict),
    "terms": (codec.encode_terms(full_terms()), codec.decode_terms),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_bytes_of_a_message_are_the_golden_ones(name: str) -> None:
    sample = SAMPLES[name]
    assert sample.to_bytes(sample.value).hex() == GOLDEN[name]


@pytest.mark.parametrize("name", SAMPLES)
def test_golden_bytes_give_the_value_back(name: str) -> None:
    sample = SAMPLES[name]
    assert sample.from_bytes(bytes.fromhex(GOLDEN[name])) == sample.value


def each_field(message: Message, path: str = "") -> Iterator[tuple[str, Message, FieldDescriptor]]:
    """Every single field that is set somewhere in a message, with the message that holds it."""
    for field in message.DESCRIPTOR.fields:
        where = f"{path}.{field.name}" if path else field.name
        if field.message_type is None:
            if not field.is_repeated:
                yield where, message, field
        elif field.is_repeated:
            for index, item in enumerate(getattr(message, field.name)):
                yield from each_field(item, f"{where}[{index}]")
        elif message.HasField(field.name):
            yield from each_field(getattr(message, field.name), where)


def spoiled(name: str, kind: str) -> Iterator[Any]:
    """(message's name, path of a field, value that spoils it)."""
    for where, holder, field in each_field(MESSAGES[name][0]):
        number = field.cpp_type in (
            FieldDescriptor.CPPTYPE_INT32,
            FieldDescriptor.CPPTYPE_INT64,
            FieldDescriptor.CPPTYPE_DOUBLE,
            FieldDescriptor.CPPTYPE_FLOAT,
        )
        if field.enum_type is not None and kind == "enum":
            for value in (0, UNKNOWN):
                if value or field.name not in NONE_IS_A_VALUE or getattr(holder, "scheme", 1) != 1:
                    yield pytest.param(name, where, value, id=f"{name}-{where}-{value}")
        elif number and kind == "zero" and field.name not in ZERO_IS_A_VALUE and getattr(holder, field.name):
            yield pytest.param(name, where, 0, id=f"{name}-{where}")
        elif number and kind == "absent" and field.has_presence and field.name not in ABSENT_IS_A_VALUE:
            yield pytest.param(name, where, None, id=f"{name}-{where}")
        elif field.cpp_type == FieldDescriptor.CPPTYPE_DOUBLE and kind == "nan":
            for value in (float("nan"), float("inf")):
                yield pytest.param(name, where, value, id=f"{name}-{where}-{value}")


def all_spoiled() -> list[Any]:
    return [
        case
        for name in MESSAGES
        for kind in ("enum", "zero", "absent", "nan")
        for case in spoiled(name, kind)
    ]


@pytest.mark.parametrize(("name", "where", "value"), all_spoiled())
def test_an_unset_or_unknown_field_is_refused_by_its_path(name: str, where: str, value: float | None) -> None:
    original, decode = MESSAGES[name]
    message = type(original)()
    message.CopyFrom(original)
    holder, field = next((h, f) for path, h, f in each_field(message) if path == where)
    if value is None:
        holder.ClearField(field.name)
    else:
        setattr(holder, field.name, value)
    with pytest.raises(BadRequest) as refused:
        decode(message)
    assert refused.value.param == f"{name}.{where}"


def test_the_walk_over_fields_finds_them() -> None:
    assert len(all_spoiled()) > 150


@pytest.mark.parametrize("field", ["schema", "model", "layout"])
def test_a_missing_part_of_a_contract_is_refused(field: str) -> None:
    message = codec.encode_contract(full_contract())
    message.ClearField(field)
    with pytest.raises(BadRequest, match=f"contract.{field} is absent"):
        codec.decode_contract(message)


def test_a_table_that_holds_no_number_is_refused_by_index() -> None:
    message = codec.encode_contract(full_contract())
    message.layer_groups[0].rotary.tables[1].inv_freq[1] = float("nan")
    with pytest.raises(BadRequest) as refused:
        codec.decode_contract(message)
    assert refused.value.param == "contract.layer_groups[0].rotary.tables[1].inv_freq[1]"


def test_a_contract_that_contradicts_itself_is_refused() -> None:
    message = codec.encode_contract(full_contract())
    message.layer_groups[1].layers[0] = 0
    with pytest.raises(BadRequest, match="layers"):
        codec.decode_contract(message)


def test_the_body_of_a_foreign_major_version_is_not_decoded() -> None:
    with pytest.raises(BadRequest, match="schema_major is 2; this side knows 1 only"):
        codec.contract_from_bytes(b"\xff no protobuf", schema_major=2)


def test_a_body_that_is_no_contract_is_refused() -> None:
    with pytest.raises(BadRequest, match="is no Contract"):
        codec.contract_from_bytes(b"\xff\xff", schema_major=1)


def test_an_empty_push_request_is_refused() -> None:
    with pytest.raises(BadRequest, match="part is unset"):
        codec.push_from_bytes(b"")


def test_bytes_that_are_no_push_request_are_refused() -> None:
    with pytest.raises(BadRequest, match="is no PushRequest"):
        codec.push_from_bytes(b"\x12\xff")


def test_a_framed_chunk_is_what_protobuf_writes() -> None:
    data = codec.push_to_bytes(full_chunk())
    message = decode_pb2.PushRequest.FromString(data)
    assert message.SerializeToString() == data
    assert message.chunk.payload == bytes(full_chunk().keys) + bytes(full_chunk().values)


def test_a_chunk_in_another_field_order_is_read_too() -> None:
    chunk = decode_pb2.PushRequest.FromString(codec.push_to_bytes(full_chunk())).chunk
    header, rest = decode_pb2.PushChunk(header=chunk.header), decode_pb2.PushChunk(payload=chunk.payload)
    rest.checksum = chunk.checksum
    inner = rest.SerializeToString() + header.SerializeToString()
    assert codec.push_from_bytes(bytes([0x12, len(inner)]) + inner) == full_chunk()


def test_keys_and_values_of_a_chunk_are_views_into_the_message() -> None:
    data = codec.push_to_bytes(full_chunk())
    chunk = codec.push_from_bytes(data)
    assert isinstance(chunk.keys, memoryview)  # type: ignore[union-attr]
    assert chunk.keys.obj is data  # type: ignore[union-attr]


def test_a_payload_shorter_than_its_header_says_is_data_loss() -> None:
    message = decode_pb2.PushRequest.FromString(codec.push_to_bytes(full_chunk()))
    message.chunk.payload = message.chunk.payload[:-1]
    with pytest.raises(DataLoss) as lost:
        codec.push_from_bytes(message.SerializeToString())
    assert lost.value.check == "totals"


def test_a_long_value_of_a_difference_is_cut_for_the_wire() -> None:
    long = replace(full_verdict().differences[0], writer="9" * 1000)
    message = codec.encode_verdict(replace(full_verdict(), differences=(long,)))
    assert message.differences[0].writer == "9" * 255 + "…"


def test_a_temperature_is_refused_until_sampling_exists() -> None:
    message = codec.encode_sampling(SAMPLES["sampling"].value[0], original_prompt_tokens=3)
    message.temperature = 0.7
    with pytest.raises(BadRequest) as refused:
        codec.decode_sampling(message)
    assert refused.value.param == "sampling.temperature"
    message.temperature = 0
    message.ClearField("choice")
    with pytest.raises(BadRequest) as refused:
        codec.decode_sampling(message)
    assert refused.value.param == "sampling.choice"
