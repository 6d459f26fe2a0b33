"""Result of a pair's probe from and to protobuf."""

from __future__ import annotations

import math

from kvpact.errors import BadRequest
from kvpact.handoff.codec_fields import join, told
from kvpact.handoff.messages import CanaryOutcome
from kvpact.v1 import prefill_pb2 as pb


def encode_canary(outcome: CanaryOutcome | None) -> pb.CanaryResult:
    """Result as a message; None says that the probe did not run."""
    if outcome is None:
        return pb.CanaryResult(ran=False)
    return pb.CanaryResult(
        ran=True,
        passed=outcome.passed,
        max_abs_error=outcome.max_abs_error,
        tolerance=outcome.tolerance,
        finding=outcome.finding,
    )


def decode_canary(message: pb.CanaryResult, path: str = "canary") -> CanaryOutcome | None:
    """Result from a message; None where the probe did not run. An infinite error is a number here.

    Raises:
        BadRequest: it ran, and a number is absent or isn't one.
    """
    if not message.ran:
        return None
    for field in ("passed", "max_abs_error", "tolerance"):
        if not message.HasField(field):
            raise BadRequest(f"{join(path, field)} is absent; the probe ran", param=join(path, field))
    if math.isnan(message.max_abs_error) or not math.isfinite(message.tolerance):
        raise BadRequest(f"{path} holds {message.max_abs_error} and {message.tolerance}", param=path)
    return CanaryOutcome(
        passed=message.passed,
        max_abs_error=message.max_abs_error,
        tolerance=message.tolerance,
        finding=told(message.finding),
    )
