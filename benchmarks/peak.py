"""How much memory some work takes, by what the kernel says of this process."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

from gradmesh.transport import packing

__all__ = ["peak", "peak_is_told"]

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def peak_is_told() -> bool:
    """Whether the system tells a process its largest size, and forgets it when asked to."""
    return _STATUS.exists() and _RESET.exists()


def peak(work: Callable[[], object], ready: Callable[[], object] = lambda: None) -> int:
    """The bytes by which this process grows at most while it works, above what it has before; its results included.

    Args:
        work: what is measured.
        ready: called right before, a barrier of the ranks for example.
    """
    gc.collect()
    # What the allocators keep from earlier work would be used again unseen.
    packing.release()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    ready()
    _RESET.write_text("5")
    before = _status("VmRSS")
    result = work()
    grown = _status("VmHWM") - before
    del result
    return max(0, grown)


def _status(field: str) -> int:
    lines = _STATUS.read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) * 1024
