"""How far a rank's clock is from that of rank 0: of one machine not at all, else as they meet."""

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
    """This machine's time, in nanoseconds; the one that torch's traces have."""
    return time.time_ns()


def machine() -> str:
    """What ranks whose clock is the same have in common."""
    return f"{platform.node()} {_BOOT.read_text() if _BOOT.exists() else ''}"


def offset() -> int:
    """Nanoseconds by which this rank's clock is ahead of that of rank 0. Every rank has to ask.

    Ranks of other machines meet several times, and look at their clocks as they part. The middle one of the
    differences counts; it is as exact as ranks leave a barrier at the same time.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return 0
    machines = _told(machine())
    if len(set(machines)) == 1:
        return 0
    times = []
    for _ in range(_ROUNDS):
        dist.barrier()
        times.append(now())
    first = _told(times)[0]
    own = machine() == machines[0]
    return 0 if own else round(median(mine - theirs for mine, theirs in zip(times, first, strict=True)))


def _told(mine: T) -> list[T]:
    every: list[T] = [mine] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return every
