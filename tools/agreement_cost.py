"""Print what the check that the ranks' calls fit together costs on shm and on Gloo: all_gather with and without it.

Both run in turn on two processes of this machine, and a row is the median over the rounds of the slower rank.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from functools import partial

import torch
import torch.distributed as dist

import gradmesh as gm
from gradmesh.ops.all_gather import AllGather
from gradmesh.ops.sizes import EQUAL
from gradmesh.wire import carrier

SIZES = (1, 1 << 10, 1 << 17, 1 << 20, 1 << 23)
"""Elements of float32 on each rank."""


def bare_op(op: AllGather, x: torch.Tensor) -> torch.Tensor:
    """The op with nothing to compare."""
    return op.transfer(x, carrier(op.axis))


def measure(rounds: int) -> list[tuple[float, float]]:
    """Median seconds of the verb, and of its op without the check, for each size."""
    axis = gm.axis()
    rows = []
    for size in SIZES:
        x = torch.ones(size)
        op = AllGather(axis, 0, EQUAL)
        checked: list[float] = []
        bare: list[float] = []
        for turn in range(rounds + 2):
            for seconds, run in ((checked, partial(gm.all_gather, x, axis)), (bare, partial(bare_op, op, x))):
                dist.barrier()
                begin = time.perf_counter()
                run()
                if turn >= 2:
                    seconds.append(time.perf_counter() - begin)
        rows.append((statistics.median(checked), statistics.median(bare)))
    return rows


def main() -> None:
    """Print the table."""
    print(
        f"torch {torch.__version__.split('+')[0]}, {platform.machine()}, {os.cpu_count()} cores, 2 processes\n"
    )
    print("| backend | bytes a rank | without the check | with it | ratio |")
    print("|---|---|---|---|---|")
    for backend in ("shm", "gloo"):
        results = gm.launch(measure, 2, backend=backend, args=(40,))
        for at, size in enumerate(SIZES):
            checked, bare = (1e3 * max(rank[at][way] for rank in results) for way in (0, 1))
            print(f"| {backend} | {4 * size:,} | {bare:.3f} ms | {checked:.3f} ms | {checked / bare:.2f} |")


if __name__ == "__main__":
    main()
