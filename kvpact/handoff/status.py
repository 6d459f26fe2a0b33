"""KvpactErrors to gRPC status with one ErrorInfo (domain kvpact), and back to the same class and facts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, NoReturn

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import DecodeError
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
from kvpact.types import (
    ContractDigest,
    Difference,
    DifferenceAction,
    Exactness,
    IdentityRelation,
    Relation,
    Verdict,
    VerdictWord,
)

logger = logging.getLogger(__name__)

DOMAIN = "kvpact"
STATUS_KEY = "grpc-status-details-bin"
DETAILS_CAP_BYTES = 4096
"""Trailers beyond about 8 KiB would arrive as RESOURCE_EXHAUSTED."""
MESSAGE_CAP = 1024
MOST_RETRY_AFTER_S = 86_400.0
VALUE_CAP = 512
HINT_KEY = "cut"
HINT = "values were cut; GetVerdict with both digests gives the whole verdict"

Facts = Mapping[str, str]
_FROM_REASON: dict[str, Callable[[str, Facts], KvpactError]] = {
    KvpactError.reason: lambda message, _: KvpactError(message),
    BadRequest.reason: lambda message, facts: BadRequest(
        message, param=facts.get("param"), code=facts.get("code")
    ),
    UnreadableSource.reason: lambda message, facts: UnreadableSource(
        message, source=facts.get("source", ""), key=facts.get("key")
    ),
    ContractRefused.reason: lambda message, facts: ContractRefused(message, verdict=_short_verdict(facts)),
    NoCompatiblePair.reason: lambda message, _: NoCompatiblePair(message, verdict=None),
    UnknownHandoff.reason: lambda message, facts: UnknownHandoff(
        message, handoff_id=bytes.fromhex(facts.get("handoff_id", ""))
    ),
    Fenced.reason: lambda message, facts: Fenced(
        message, expected=facts.get("expected", ""), found=facts.get("found", "")
    ),
    Exhausted.reason: lambda message, facts: Exhausted(
        message, retry_after_s=_retry_after_s(facts.get("retry_after_s", "1"))
    ),
    DataLoss.reason: lambda message, facts: DataLoss(message, check=facts.get("check", "")),
    Unavailable.reason: lambda message, _: Unavailable(message),
    NotPermitted.reason: lambda message, facts: NotPermitted(
        message, method=facts.get("method", ""), names=facts.get("names", "")
    ),
    SelfCheckFailed.reason: lambda message, _: SelfCheckFailed(message),
}


def to_status(error: KvpactError) -> status_pb2.Status:
    """Status with one ErrorInfo, and a RetryInfo where the error says when to try again; less than 4 KiB."""
    code = grpc.StatusCode[ERROR_CODES[type(error)].grpc]
    metadata = {key: _cut(value, VALUE_CAP) for key, value in error.metadata().items()}
    if metadata != error.metadata():
        metadata[HINT_KEY] = HINT
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=metadata)
    status = status_pb2.Status(
        code=code.value[0], message=_cut(str(error), MESSAGE_CAP), details=[_pack(info)]
    )
    if isinstance(error, Exhausted):
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(round(error.retry_after_s * 1000))
        status.details.append(_pack(retry))
    assert status.ByteSize() < DETAILS_CAP_BYTES, "errors have few facts, each is cut"
    return status


def from_status(status: status_pb2.Status) -> KvpactError | None:
    """The error that `to_status` was given; None for a status that isn't ours."""
    for detail in status.details:
        info = error_details_pb2.ErrorInfo()
        try:
            if detail.Unpack(info) and info.domain == DOMAIN and info.reason in _FROM_REASON:
                return _FROM_REASON[info.reason](status.message, dict(info.metadata))
        except (DecodeError, ValueError):
            logger.warning("unreadable details of a status: %s", info.reason or "no ErrorInfo")
    return None


def from_rpc_error(error: grpc.aio.AioRpcError, *, peer: str) -> KvpactError:
    """The error that the peer raised, or what stands for a failure of the call itself."""
    for key, value in error.trailing_metadata() or ():
        if key == STATUS_KEY and isinstance(value, bytes):
            told = _parse(value)
            if told is not None:
                return told
    text = f"{peer}: {error.code().name} {_cut(error.details() or '', MESSAGE_CAP)}".rstrip()
    match error.code():
        case grpc.StatusCode.UNAVAILABLE:
            return Unavailable(f"can't reach {text}")
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return Unavailable(f"no answer in time from {text}")
        case grpc.StatusCode.CANCELLED:
            return Unavailable(f"call ended by {text}")
        case grpc.StatusCode.INVALID_ARGUMENT:
            return BadRequest(text)
        case _:
            return KvpactError(text)


def status_to_bytes(error: KvpactError) -> bytes:
    """Serialised status of an error, for `status_from_bytes` in another process."""
    data: bytes = to_status(error).SerializeToString()
    return data


def status_from_bytes(data: bytes) -> KvpactError:
    """The error whose serialised status `data` is; a plain KvpactError where it can't be told."""
    return _parse(data) or KvpactError("an error whose status can't be read")


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: KvpactError) -> NoReturn:
    """Ends a call with the status of `error`."""
    status = to_status(error)
    code = grpc.StatusCode[ERROR_CODES[type(error)].grpc]
    trailers = ((STATUS_KEY, status.SerializeToString()),)
    await context.abort(code, _cut(status.message, VALUE_CAP), trailing_metadata=trailers)
    raise AssertionError("abort always raises")


@asynccontextmanager
async def answering(context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[None]:
    """Answers errors of its body: a KvpactError as it is, others as INTERNAL, logged, without their text."""
    try:
        yield
    except KvpactError as error:
        await abort(context, error)
    except (asyncio.CancelledError, grpc.aio.AbortError):
        raise
    except Exception:
        logger.exception("unexpected error in a call")
        await abort(context, KvpactError("internal error; the worker's log has it"))


def _retry_after_s(text: str) -> float:
    """Seconds that a peer says, from 0 up to MOST_RETRY_AFTER_S; raises ValueError for what is no number."""
    seconds = float(text)
    if not 0 <= seconds <= MOST_RETRY_AFTER_S:
        raise ValueError("retry_after_s is out of range")
    return seconds


def _parse(data: bytes) -> KvpactError | None:
    status = status_pb2.Status()
    try:
        status.ParseFromString(data)
    except DecodeError:
        return None
    return from_status(status)


def _short_verdict(facts: Facts) -> Verdict:
    """What ErrorInfo has of a refusal: digests and names of refusing fields."""
    differences = tuple(
        Difference(
            field=field,
            layers=(),
            writer="",
            reader="",
            relation=Relation.INCOMPATIBLE,
            action=DifferenceAction.REJECT,
            remedy="read the whole verdict with GetVerdict",
        )
        for field in facts.get("fields", "").split(",")
        if field
    )
    return Verdict(
        word=VerdictWord.REJECT,
        identity=IdentityRelation.NOT_COMPARED,
        differences=differences,
        plan=(),
        exactness=Exactness.BIT_EXACT,
        writer_digest=ContractDigest(bytes.fromhex(facts.get("writer_digest", ""))),
        reader_digest=ContractDigest(bytes.fromhex(facts.get("reader_digest", ""))),
    )


def _pack(message: error_details_pb2.ErrorInfo | error_details_pb2.RetryInfo) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message, deterministic=True)
    return packed


def _cut(text: str, most_bytes: int) -> str:
    data = text.encode("utf-8", "replace")
    return text if len(data) <= most_bytes else data[: most_bytes - 3].decode("utf-8", "ignore") + "…"
