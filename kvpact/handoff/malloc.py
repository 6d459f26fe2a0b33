"""Tells glibc's malloc to keep MiB-sized buffers.

By default each message of that size maps, unmaps and faults its pages anew: half the speed of a stream.
"""

from __future__ import annotations

import ctypes
import sys

M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
MMAP_THRESHOLD_BYTES = 32 << 20
"""The largest that glibc takes on 64-bit machines."""
TRIM_THRESHOLD_BYTES = 256 << 20


def tune_malloc() -> bool:
    """Raises malloc's mmap and trim thresholds for this process; whether it could. Call at worker start."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    mallopt.argtypes, mallopt.restype = (ctypes.c_int, ctypes.c_int), ctypes.c_int
    return bool(
        mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES) and mallopt(M_TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES)
    )
