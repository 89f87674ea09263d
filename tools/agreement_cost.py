"""Print what comparing costs: all_gather and its backward at each level of `gradmesh.check`, on each backend.

    python tools/agreement_cost.py

The levels run in turn on two ranks of this machine, and a cell is the median over the rounds of the slower rank. The
backward is one `autograd.grad` of a result that is kept, with gradients that differ from rank to rank.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable

import click
import torch

import gradmesh as gm
from gradmesh.runtime.checking import Level

SIZES = (1, 1 << 10, 1 << 17, 1 << 20, 1 << 23)
"""Elements of float32 on each rank."""
LEVELS: tuple[Level, ...] = (0, 1, "full")


def measure(rounds: int) -> list[list[float]]:
    """Median seconds for each size: forward at each level, then backward at each level."""
    rows = []
    for size in SIZES:
        x = torch.randn(size, requires_grad=True)
        graphs = []
        for level in LEVELS:
            with gm.check(level):
                graphs.append(gm.all_gather(x))
        cotangent = torch.full((2 * size,), 1.0 + gm.rank())

        def backward(y: torch.Tensor, x: torch.Tensor = x, cotangent: torch.Tensor = cotangent) -> None:
            torch.autograd.grad(y, x, cotangent, retain_graph=True)

        times: list[list[float]] = [[] for _ in range(2 * len(LEVELS))]
        for turn in range(rounds + 2):
            for at, level in enumerate(LEVELS):
                calls: tuple[Callable[[], object], ...] = (
                    lambda x=x: gm.all_gather(x),  # type: ignore[misc]
                    lambda y=graphs[at]: backward(y),  # type: ignore[misc]
                )
                for direction, call in enumerate(calls):
                    gm.barrier()
                    with gm.check(level):
                        begin = time.perf_counter()
                        call()
                    if turn >= 2:
                        times[direction * len(LEVELS) + at].append(time.perf_counter() - begin)
        rows.append([statistics.median(seconds) for seconds in times])
    return rows


@click.command(help=__doc__.splitlines()[0] if __doc__ else None)
@click.option("--rounds", default=40, show_default=True, help="How often each is measured.")
@click.option("--backend", "backends", multiple=True, default=("threads", "shm", "gloo"))
def main(rounds: int, backends: tuple[str, ...]) -> None:
    """Print the table."""
    print(f"torch {torch.__version__.split('+')[0]}, {platform.machine()}, {os.cpu_count()} cores, 2 ranks\n")
    print("| backend | bytes a rank | forward, ms: 0 | 1 | full | backward, ms: 0 | 1 | full |")
    print("|---|---|---|---|---|---|---|---|")
    for backend in backends:
        results = gm.launch(measure, 2, backend=backend, args=(rounds,))
        for at, size in enumerate(SIZES):
            slower = [1e3 * max(result[at][column] for result in results) for column in range(6)]
            cells = [
                f"{value:.3f}" + (f" ({value / slower[column // 3 * 3]:.2f})" if column % 3 else "")
                for column, value in enumerate(slower)
            ]
            print(f"| {backend} | {4 * size:,} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
