"""Writes the corpus of hostile messages: python -m tests.corpus.make."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from google.rpc import error_details_pb2, status_pb2

from kvpact.handoff import codec
from kvpact.v1 import contract_pb2, decode_pb2
from tests.factories import make_contract
from tests.hostile import varint
from tests.rpc_samples import RPCS

FOLDER = Path(__file__).parent
CONTRACT, STATUS = "Contract", "Status"
"""Read by contract_from_bytes, and by whoever gets an error from a peer."""


class Case(NamedTuple):
    """One file of the corpus."""

    message: str
    """Rpc and direction as in tests.hostile.READERS, CONTRACT or STATUS."""
    name: str
    expected: str
    """What comes of reading it: `read`, or the error's name."""
    why: str
    data: bytes

    @property
    def path(self) -> Path:
        """Where it lies, below the folder."""
        return Path(self.message.replace(" ", "."), f"{self.name}.bin")


def changed(sample: str, change: Callable[[Any], object]) -> bytes:
    """A valid message with one change."""
    message = type(RPCS[sample])()
    message.CopyFrom(RPCS[sample])
    change(message)
    return message.SerializeToString(deterministic=True)


def contract(change: Callable[[contract_pb2.Contract], object]) -> bytes:
    """A valid contract with one change."""
    message = codec.encode_contract(make_contract())
    change(message)
    return message.SerializeToString(deterministic=True)


def many_heads(message: contract_pb2.Contract) -> None:
    """A reader with 2^31 - 2 heads over two ranks: comparing shards would go through each of them."""
    shard = message.layout.shard
    for group in message.layer_groups:
        group.kv_heads = 2**31 - 2
    shard.tensor_parallel_size, shard.head_end = 2, 2**30 - 1


def many_lengths(message: contract_pb2.Contract) -> None:
    """A table for each length from 1 to 100: a pair would be judged anew at each."""
    for group in message.layer_groups:
        table = group.rotary.tables[0]
        for length in range(1, 101):
            group.rotary.tables.add().CopyFrom(table)
            group.rotary.tables[-1].upper_length_tokens = length


def _status(**facts: str) -> bytes:
    status = status_pb2.Status(code=8, message="no room")
    info = error_details_pb2.ErrorInfo(reason="EXHAUSTED", domain="kvpact", metadata=facts)
    status.details.add().Pack(info)
    return status.SerializeToString(deterministic=True)


def _workers() -> Iterator[Case]:
    register, connect = "CoordinatorService.Register request", "PrefillService.Connect request"
    for name, endpoint in (
        ("endpoint_of_a_socket_file", "unix:/run/secret.sock"),
        ("endpoint_with_a_scheme", "dns:8080"),
        ("endpoint_with_a_line_break", "127.0.0.1:9000\nINFO all is well"),
        ("endpoint_of_5000_characters", "h" * 5_000 + ":1"),
        ("endpoint_beyond_the_last_port", "127.0.0.1:65536"),
    ):
        why = "gRPC would open what it names, and logs would show it"
        change = _setter("endpoint", endpoint)
        yield Case(register, name, "BadRequest", why, changed(register, change))
        change = _setter("decode_endpoint", endpoint)
        yield Case(connect, name, "BadRequest", why, changed(connect, change))
    for name, worker in (("name_with_a_line_break", "a\nb"), ("name_of_5000_characters", "n" * 5_000)):
        why = "names are keys of tables, labels of metrics and words of logs"
        data = changed(register, lambda message, worker=worker: setattr(message.worker, "worker", worker))
        yield Case(register, name, "BadRequest", why, data)
    why = "no process has it"
    yield Case(register, "pid_below_0", "BadRequest", why, changed(register, _setter("pid", -1)))
    release = "WorkerService.Release request"
    why = "a release is never refused, but tombstones keep its reason: it is cut"
    data = changed(release, _setter("reason", "r\n" * 2_500))
    yield Case(release, "reason_of_5000_characters", "read", why, data)
    heartbeat = "CoordinatorService.Heartbeat request"
    why = "each holder is a label of a metric"
    data = changed(
        heartbeat, lambda message: message.load.blocks.held.extend([message.load.blocks.held[0]] * 300)
    )
    yield Case(heartbeat, "holders_by_the_hundred", "BadRequest", why, data)


def _setter(field: str, value: object) -> Callable[[Any], object]:
    return lambda message: setattr(message, field, value)


def _handoffs() -> Iterator[Case]:
    granted = "DecodeService.Reserve response"
    yield Case(
        granted,
        "held_prefix_of_no_whole_blocks",
        "read",
        "decodes; the sender refuses it, and once failed an assertion",
        changed(granted, lambda message: setattr(message.reservation, "held_prefix_tokens", 5)),
    )
    renewed = "WorkerService.Renew response"
    yield Case(
        renewed,
        "lease_of_ages",
        "BadRequest",
        "timers overflow",
        changed(renewed, lambda message: setattr(message.lease, "seconds", 2**63 - 1)),
    )
    connected = "PrefillService.Connect response"
    why = "fields of differences are labels of metrics"
    data = changed(connected, lambda message: setattr(message.verdict.differences[0], "field", "x" * 5_000))
    yield Case(connected, "difference_without_a_name", "BadRequest", why, data)
    reserve = "DecodeService.Reserve request"
    for name, change in (
        ("position_run_of_2_to_the_31", lambda terms: setattr(terms.positions[0], "count_tokens", 2**31 - 1)),
        ("token_below_0", lambda terms: terms.token_ids.append(-1)),
    ):
        expected = "BadRequest" if name.startswith("token") else "read"
        data = changed(reserve, lambda message, change=change: change(message.terms))
        yield Case(reserve, name, expected, "refused by the codec or by the terms' check", data)
    for message in RPCS:
        name = message.split(":")[0]
        if name == "DecodeService.Push request":
            continue
        for tag in (1, 2):
            claim = varint(tag << 3 | 2) + varint(2**40) + b"xy"
            expected = "BadRequest"
            yield Case(name, f"field_{tag}_claims_2_to_the_40", expected, "no such length is there", claim)


def _pushes() -> Iterator[Case]:
    push = "DecodeService.Push request"
    valid = decode_pb2.PushRequest(chunk=RPCS["DecodeService.Push request: chunk"].chunk).SerializeToString()
    why = "a frame whose own lengths lie"
    yield Case(push, "empty", "BadRequest", "no part is set", b"")
    yield Case(push, "tag_alone", "BadRequest", why, valid[:1])
    yield Case(push, "part_claims_2_to_the_34", "BadRequest", why, b"\x12" + varint(2**34) + valid[2:])
    yield Case(push, "varint_without_end", "BadRequest", why, b"\x12" + b"\xff" * 16)
    yield Case(push, "cut_in_the_payload", "BadRequest", why, valid[:-3])
    short = decode_pb2.PushRequest.FromString(valid)
    short.chunk.payload = b"x"
    yield Case(push, "payload_shorter_than_told", "DataLoss", why, short.SerializeToString())
    short.chunk.header.key_bytes = 2**63 - 1
    yield Case(push, "keys_of_2_to_the_63_bytes", "DataLoss", why, short.SerializeToString())


def cases() -> list[Case]:
    """All of them, each once."""
    found = [*_workers(), *_handoffs(), *_pushes()]
    found += [
        Case(CONTRACT, "heads_by_the_billion", "BadRequest", many_heads.__doc__ or "", contract(many_heads)),
        Case(
            CONTRACT,
            "lengths_by_the_hundred",
            "BadRequest",
            many_lengths.__doc__ or "",
            contract(many_lengths),
        ),
        Case(STATUS, "retry_after_nan", "KvpactError", "ceil(nan) fails", _status(retry_after_s="nan")),
        Case(STATUS, "retry_after_inf", "KvpactError", "round(inf) fails", _status(retry_after_s="1e999")),
        Case(STATUS, "retry_after_1", "Exhausted", "a valid one", _status(retry_after_s="1")),
    ]
    return list({case.path: case for case in found}.values())


def readme(found: list[Case]) -> str:
    """One line for each file."""
    lines = [
        "# Hostile messages",
        "",
        "Serialised messages that are, or once were, trouble, each with what reading it gives and why it is",
        "here. `python -m tests.corpus.make` writes them; tests/property/test_corpus.py reads them.",
        "",
        *(f"- `{case.path}`: {case.expected}. {case.why.rstrip('.')}." for case in found),
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    """Writes every file and the list of them."""
    found = cases()
    for case in found:
        path = FOLDER / case.path
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(case.data)
    (FOLDER / "README.md").write_text(readme(found), encoding="utf-8")


if __name__ == "__main__":
    main()
