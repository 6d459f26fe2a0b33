"""Errors on the gRPC wire: every class has its row, and comes back as the same class with the same facts."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import grpc
import pytest
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2

from kvpact.errors import (
    ERROR_CODES,
    BadRequest,
    ContractRefused,
    DataLoss,
    Exhausted,
    Fenced,
    KvpactError,
    NoCompatiblePair,
    NotPermitted,
    SelfCheckFailed,
    Unavailable,
    UnknownHandoff,
    UnreadableSource,
)
from kvpact.handoff.status import (
    DETAILS_CAP_BYTES,
    STATUS_KEY,
    answering,
    from_rpc_error,
    from_status,
    to_status,
)
from kvpact.types import DifferenceAction
from tests.handoff_samples import full_verdict

ERRORS: list[KvpactError] = [
    KvpactError("odd"),
    BadRequest("wrong", param="terms.adapter", code="not_served"),
    BadRequest("wrong"),
    UnreadableSource("can't read", source="/model", key="rope_theta"),
    ContractRefused("refused", verdict=full_verdict()),
    NoCompatiblePair("none", verdict=None),
    UnknownHandoff("gone", handoff_id=b"h" * 16),
    Fenced("stale", expected="aa", found="bb"),
    Exhausted("full", retry_after_s=1.5),
    DataLoss("broken", check="checksum"),
    Unavailable("draining"),
    NotPermitted("refused", method="Push", names="coordinator.kvpact"),
    SelfCheckFailed("logits differ"),
]


def all_error_classes(base: type[KvpactError] = KvpactError) -> set[type[KvpactError]]:
    below = (all_error_classes(kind) for kind in base.__subclasses__() if kind.__module__ == "kvpact.errors")
    return {base}.union(*below)


def test_every_error_has_a_row_and_every_row_an_error() -> None:
    assert set(ERROR_CODES) == all_error_classes()
    assert {type(error) for error in ERRORS} == all_error_classes()
    assert all(row.grpc in grpc.StatusCode.__members__ for row in ERROR_CODES.values())
    assert len({kind.reason for kind in ERROR_CODES}) == len(ERROR_CODES)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_comes_back_as_it_went(error: KvpactError) -> None:
    status = to_status(error)
    back = from_status(status_pb2.Status.FromString(status.SerializeToString()))
    assert type(back) is type(error)
    assert str(back) == str(error)
    assert back is not None
    assert back.metadata() == error.metadata() | changed_facts(error)
    assert grpc.StatusCode[ERROR_CODES[type(error)].grpc].value[0] == status.code


def changed_facts(error: KvpactError) -> dict[str, str]:
    """Differences that don't refuse aren't told in the status."""
    return {"difference_count": "1"} if isinstance(error, ContractRefused) else {}


def test_a_refusal_tells_digests_and_refusing_fields_only() -> None:
    back = from_status(to_status(ContractRefused("refused", verdict=full_verdict())))
    assert isinstance(back, ContractRefused)
    assert [(d.field, d.action) for d in back.verdict.differences] == [("inv_freq", DifferenceAction.REJECT)]
    assert (back.verdict.writer_digest, back.verdict.reader_digest) == (b"a" * 32, b"b" * 32)


def test_an_exhausted_status_says_when_to_retry() -> None:
    retry = error_details_pb2.RetryInfo()
    assert to_status(Exhausted("full", retry_after_s=1.5)).details[1].Unpack(retry)
    assert retry.retry_delay.ToMilliseconds() == 1500


def test_long_texts_are_cut_and_point_to_get_verdict() -> None:
    difference = full_verdict().differences[0]
    many = tuple(replace(difference, field=f"field_{index}_" + "ä" * 200) for index in range(100))
    error = ContractRefused("ü" * 9000, verdict=replace(full_verdict(), differences=many))
    status = to_status(error)
    assert status.ByteSize() < DETAILS_CAP_BYTES
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert "GetVerdict" in info.metadata["cut"]
    assert info.metadata["writer_digest"] == (b"a" * 32).hex()
    assert info.metadata["difference_count"] == "100"
    assert isinstance(from_status(status), ContractRefused)


def rpc_error(code: grpc.StatusCode, *, trailers: tuple[tuple[str, bytes], ...] = ()) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailers), details="as told")


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, Unavailable),
        (grpc.StatusCode.DEADLINE_EXCEEDED, Unavailable),
        (grpc.StatusCode.CANCELLED, Unavailable),
        (grpc.StatusCode.INVALID_ARGUMENT, BadRequest),
        (grpc.StatusCode.UNIMPLEMENTED, KvpactError),
        (grpc.StatusCode.INTERNAL, KvpactError),
    ],
)
def test_a_status_without_our_details_names_peer_and_code(
    code: grpc.StatusCode, kind: type[KvpactError]
) -> None:
    error = from_rpc_error(rpc_error(code), peer="10.0.0.1:7000")
    assert type(error) is kind
    assert "10.0.0.1:7000" in str(error)
    assert "as told" in str(error)


def test_foreign_and_broken_details_are_no_error_of_ours() -> None:
    foreign = any_pb2.Any()
    foreign.Pack(error_details_pb2.ErrorInfo(reason="FENCED", domain="elsewhere"))
    for data in (b"\xff\xff", status_pb2.Status(code=10, details=[foreign]).SerializeToString()):
        error = from_rpc_error(rpc_error(grpc.StatusCode.ABORTED, trailers=((STATUS_KEY, data),)), peer="p")
        assert type(error) is KvpactError
    broken = any_pb2.Any()
    broken.Pack(
        error_details_pb2.ErrorInfo(reason="UNKNOWN_HANDOFF", domain="kvpact", metadata={"handoff_id": "xy"})
    )
    assert from_status(status_pb2.Status(details=[broken])) is None


def test_details_that_are_no_error_info_leave_the_code_of_the_call() -> None:
    torn = any_pb2.Any(type_url="type.googleapis.com/google.rpc.ErrorInfo", value=b"\x0a\xff")
    data = status_pb2.Status(code=14, details=[torn]).SerializeToString()
    error = from_rpc_error(rpc_error(grpc.StatusCode.UNAVAILABLE, trailers=((STATUS_KEY, data),)), peer="p")
    assert type(error) is Unavailable
    fenced = status_pb2.Status(details=[torn, *to_status(Fenced("stale", expected="a", found="b")).details])
    assert type(from_status(fenced)) is Fenced


class FakeContext:
    """Remembers how a call was ended."""

    def __init__(self) -> None:
        self.ended: tuple[grpc.StatusCode, str, tuple[tuple[str, bytes], ...]] | None = None

    async def abort(self, code: grpc.StatusCode, details: str, trailing_metadata: Any) -> None:
        self.ended = (code, details, trailing_metadata)
        raise grpc.aio.AbortError


async def answer(error: BaseException) -> FakeContext:
    context: Any = FakeContext()
    with pytest.raises((grpc.aio.AbortError, asyncio.CancelledError)):
        async with answering(context):
            raise error
    assert isinstance(context, FakeContext)
    return context


async def test_an_unexpected_exception_is_internal_and_keeps_its_text_to_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    context = await answer(RuntimeError("secret path /home/x"))
    assert context.ended is not None
    code, details, trailers = context.ended
    assert code is grpc.StatusCode.INTERNAL
    assert "secret" not in details
    assert b"secret" not in trailers[0][1]
    assert "secret path" in caplog.text


async def test_a_known_error_ends_the_call_with_its_code_and_a_cancelled_one_not_at_all() -> None:
    context = await answer(Fenced("stale", expected="a", found="b"))
    assert context.ended is not None
    assert context.ended[0] is grpc.StatusCode.ABORTED
    assert (await answer(asyncio.CancelledError())).ended is None
