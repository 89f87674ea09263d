"""Print what fresh results cost: writing memory that was used before, memory from torch, and recycled memory.

A result dies before the next one is made, or three of them live at a time, as in a training step. Each figure is the
median over the rounds of one process, the three in turn.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from gradmesh.transport import packing

SIZES = (4 << 20, 16 << 20, 32 << 20, 64 << 20, 128 << 20)
"""Bytes of a result."""
ROUNDS = 15


def milliseconds(size: int, live: int) -> dict[str, float]:
    """The time to get a result of that size and write it, with so many of them alive."""
    count = size // 4
    source, same = torch.ones(count), torch.empty(count)
    ways: dict[str, Callable[[], Tensor]] = {
        "used before": lambda: same,
        "torch.empty": lambda: torch.empty(count),
        "recycled": lambda: packing.empty((count,), torch.float32, source.device),
    }
    held: dict[str, deque[Tensor]] = {name: deque(maxlen=live) for name in ways}
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(ROUNDS + live + 1):
        for name, get in ways.items():
            begin = time.perf_counter()
            if len(held[name]) == live:
                held[name].popleft()
            held[name].append(get().copy_(source))
            if turn > live:
                taken[name].append(1e3 * (time.perf_counter() - begin))
    return {name: statistics.median(times) for name, times in taken.items()}


def main() -> None:
    """Print the table, as Markdown."""
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {platform.machine()}, {os.cpu_count()} cores, one thread\n")
    print("| result | alive | used before | torch.empty | recycled | gain |")
    print("|---|---|---|---|---|---|")
    for live in (1, 3):
        for size in SIZES:
            found = milliseconds(size, live)
            cells = " | ".join(f"{ms:.2f} ms" for ms in found.values())
            print(
                f"| {size >> 20} MiB | {live} | {cells} | {found['torch.empty'] / found['recycled']:.1f}x |"
            )


if __name__ == "__main__":
    main()
