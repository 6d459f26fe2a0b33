"""Every error that crosses a boundary.

    KvpactError
      BadRequest           the caller's input is wrong; retrying as it stands is useless
      UnreadableSource     a model folder, config, contract file or GGUF can't be read
      ContractRefused      writer and reader can't share a cache; carries the verdict
      NoCompatiblePair     no two workers agreed; carries the differences of the nearest pair
      UnknownHandoff       never seen, released or expired
      Fenced               another incarnation or generation than the one meant
      Exhausted            no room now; carries when to try again
      DataLoss             checksum, totals, holes or witness failed
      Unavailable          draining or unreachable
      NotPermitted         the caller's certificate is for another role than this call's
      SelfCheckFailed      the engine doesn't reproduce the model's own forward

Facts are attributes; `metadata()` gives them as text for ErrorInfo. One table, ERROR_CODES, maps each class
to its gRPC code and HTTP status.
"""

from __future__ import annotations

from typing import NamedTuple

from kvpact.types import DifferenceAction, Verdict


class KvpactError(Exception):
    """Base of all errors that a caller may see."""

    reason = "INTERNAL"

    def metadata(self) -> dict[str, str]:
        """Facts of the error as text."""
        return {}


class BadRequest(KvpactError):
    """Input that can't be served as it stands."""

    reason = "BAD_REQUEST"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code

    def metadata(self) -> dict[str, str]:
        """Field at fault and a finer code."""
        facts = {"param": self.param, "code": self.code}
        return {key: value for key, value in facts.items() if value is not None}


class UnreadableSource(KvpactError):
    """A source of contracts that can't be read: what was found, what was expected, what to do."""

    reason = "UNREADABLE_SOURCE"

    def __init__(self, message: str, *, source: str, key: str | None = None) -> None:
        super().__init__(message)
        self.source = source
        self.key = key

    def metadata(self) -> dict[str, str]:
        """Source and key at fault."""
        return {"source": self.source} | ({"key": self.key} if self.key else {})


class ContractRefused(KvpactError):
    """Writer and reader can't share a cache."""

    reason = "CONTRACT_REFUSED"

    def __init__(self, message: str, *, verdict: Verdict) -> None:
        super().__init__(message)
        self.verdict = verdict

    def metadata(self) -> dict[str, str]:
        """Digests under which GetVerdict gives the whole verdict, and the first names of refusing fields."""
        rejecting = (each for each in self.verdict.differences if each.action is DifferenceAction.REJECT)
        fields = sorted({difference.field for difference in rejecting})
        return {
            "writer_digest": self.verdict.writer_digest.hex(),
            "reader_digest": self.verdict.reader_digest.hex(),
            "difference_count": str(len(self.verdict.differences)),
            "fields": ",".join(fields[:16]),
        }


class NoCompatiblePair(KvpactError):
    """No prefill worker and decode worker agreed on a cache."""

    reason = "NO_COMPATIBLE_PAIR"

    def __init__(self, message: str, *, verdict: Verdict | None) -> None:
        super().__init__(message)
        self.verdict = verdict


class UnknownHandoff(KvpactError):
    """A handoff that is not, or no longer, there."""

    reason = "UNKNOWN_HANDOFF"

    def __init__(self, message: str, *, handoff_id: bytes) -> None:
        super().__init__(message)
        self.handoff_id = handoff_id

    def metadata(self) -> dict[str, str]:
        """Handoff id in hex."""
        return {"handoff_id": self.handoff_id.hex()}


class Fenced(KvpactError):
    """A message for another incarnation or generation."""

    reason = "FENCED"

    def __init__(self, message: str, *, expected: str, found: str) -> None:
        super().__init__(message)
        self.expected = expected
        self.found = found

    def metadata(self) -> dict[str, str]:
        """Both values."""
        return {"expected": self.expected, "found": self.found}


class Exhausted(KvpactError):
    """No room now."""

    reason = "EXHAUSTED"

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s

    def metadata(self) -> dict[str, str]:
        """Seconds to wait."""
        return {"retry_after_s": f"{self.retry_after_s:g}"}


class DataLoss(KvpactError):
    """Bytes or rows that aren't what the writer said."""

    reason = "DATA_LOSS"

    def __init__(self, message: str, *, check: str) -> None:
        super().__init__(message)
        self.check = check

    def metadata(self) -> dict[str, str]:
        """Which check failed: checksum, totals, holes, order, witness or finite."""
        return {"check": self.check}


class Unavailable(KvpactError):
    """A worker that is draining or can't be reached."""

    reason = "UNAVAILABLE"


class NotPermitted(KvpactError):
    """A call that the caller's certificate doesn't entitle it to."""

    reason = "NOT_PERMITTED"

    def __init__(self, message: str, *, method: str, names: str) -> None:
        super().__init__(message)
        self.method = method
        self.names = names

    def metadata(self) -> dict[str, str]:
        """The call, and the names in the caller's certificate."""
        return {"method": self.method, "names": self.names}


class SelfCheckFailed(KvpactError):
    """The engine doesn't reproduce the model's own forward."""

    reason = "SELF_CHECK_FAILED"


class ErrorCode(NamedTuple):
    """How an error shows on each wire."""

    grpc: str
    http: int


ERROR_CODES: dict[type[KvpactError], ErrorCode] = {
    KvpactError: ErrorCode("INTERNAL", 500),
    BadRequest: ErrorCode("INVALID_ARGUMENT", 400),
    UnreadableSource: ErrorCode("INVALID_ARGUMENT", 400),
    ContractRefused: ErrorCode("FAILED_PRECONDITION", 503),
    NoCompatiblePair: ErrorCode("FAILED_PRECONDITION", 503),
    UnknownHandoff: ErrorCode("NOT_FOUND", 500),
    Fenced: ErrorCode("ABORTED", 503),
    Exhausted: ErrorCode("RESOURCE_EXHAUSTED", 429),
    DataLoss: ErrorCode("DATA_LOSS", 500),
    Unavailable: ErrorCode("UNAVAILABLE", 503),
    NotPermitted: ErrorCode("PERMISSION_DENIED", 500),
    SelfCheckFailed: ErrorCode("FAILED_PRECONDITION", 500),
}
