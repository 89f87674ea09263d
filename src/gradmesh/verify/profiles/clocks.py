"""The offset of a rank's clock from that of rank 0: 0 on the same host, otherwise measured with barriers."""

from __future__ import annotations

import platform
import time
from pathlib import Path
from statistics import median
from typing import TypeVar

import torch.distributed as dist

__all__ = ["machine", "now", "offset"]

_ROUNDS = 9
T = TypeVar("T")
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def now() -> int:
    """The host's time in nanoseconds, as in torch's traces."""
    return time.time_ns()


def machine() -> str:
    """An id of the host; ranks with the same id share a clock."""
    return f"{platform.node()} {_BOOT.read_text() if _BOOT.exists() else ''}"


def offset() -> int:
    """Nanoseconds by which this rank's clock is ahead of that of rank 0. Every rank must call this.

    Between hosts, all ranks read their clocks after each of several barriers, and the median difference counts. Its
    error is the time by which ranks leave a barrier at different times.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return 0
    machines = _gathered(machine())
    if len(set(machines)) == 1:
        return 0
    times = []
    for _ in range(_ROUNDS):
        dist.barrier()
        times.append(now())
    first = _gathered(times)[0]
    same_host = machine() == machines[0]
    return 0 if same_host else round(median(mine - theirs for mine, theirs in zip(times, first, strict=True)))


def _gathered(mine: T) -> list[T]:
    every: list[T] = [mine] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return every
