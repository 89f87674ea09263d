"""What a verb costs above the raw call: forward and backward, on 2 ranks of shm, of one checkout or of several in turn.

    python tools/wrapper_overhead.py
    python tools/wrapper_overhead.py ../before/src src --rounds 5

Each round starts fresh ranks for each checkout, one after another, so that what else the machine does falls on all
alike. The raw call is that of the process group itself, with its result in place. Forward is `all_gather` of a tensor
that requires grad, less the raw all_gather; backward is `autograd.grad` of its result, less the raw reduce_scatter.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist

import gradmesh as gm

REPEATS, CALLS = 40, 40


def on_rank(elements: int) -> list[float]:
    """Median microseconds on this rank: raw all_gather, raw reduce_scatter, forward, forward and backward."""
    x = torch.ones(elements, requires_grad=True)
    given, whole, part = torch.ones(elements), torch.empty(2 * elements), torch.empty(elements)
    cotangent = torch.ones(2 * elements)
    group: Any = dist.group.WORLD
    calls: list[Callable[[], object]] = [
        lambda: group.all_gather_single(whole, given).wait(),
        lambda: group.reduce_scatter_single(part, whole).wait(),
        lambda: gm.all_gather(x),
        lambda: torch.autograd.grad(gm.all_gather(x), x, cotangent),
    ]
    seconds: list[list[float]] = [[] for _ in calls]
    for _ in range(REPEATS):
        for call, taken in zip(calls, seconds, strict=True):
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(CALLS):
                call()
            taken.append((time.perf_counter() - begin) / CALLS)
    return [1e6 * statistics.median(taken) for taken in seconds]


def overheads(source: str, elements: int) -> tuple[float, float]:
    """Forward and backward overhead of a checkout, in microseconds, measured in a process of its own."""
    program = f"import tools.wrapper_overhead as t; print(*t.on_ranks({elements}))"
    path = os.pathsep.join([source, str(Path(__file__).parent.parent)])
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    forward, backward = map(float, done.stdout.split()[-2:])
    return forward, backward


def on_ranks(elements: int) -> tuple[float, float]:
    """The same with the gradmesh of this process."""
    gather, scatter, forward, both = gm.launch(on_rank, 2, backend="shm", args=(elements,))[0]
    return forward - gather, both - forward - scatter


@click.command(help=__doc__.splitlines()[0] if __doc__ else None)
@click.argument("sources", nargs=-1, type=click.Path(exists=True, file_okay=False))
@click.option("--rounds", default=3, show_default=True, help="How often each checkout is measured.")
@click.option("--elements", default=1, show_default=True, help="Elements of float32 on each rank.")
def main(sources: tuple[str, ...], rounds: int, elements: int) -> None:
    """Print the table."""
    own = str(Path(gm.__file__).parent.parent)
    found: dict[str, list[tuple[float, float]]] = {
        str(Path(source).resolve()): [] for source in sources or (own,)
    }
    for _ in range(rounds):
        for source, rows in found.items():
            rows.append(overheads(source, elements))
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, 2 ranks on shm, {4 * elements} bytes a rank\n")
    print("| checkout | forward us, median (least to most) | backward us |")
    print("|---|---|---|")
    for source, rows in found.items():
        shown = [
            f"{statistics.median(column):.0f} ({min(column):.0f} to {max(column):.0f})"
            for column in zip(*rows, strict=True)
        ]
        print(f"| {source} | {' | '.join(shown)} |")


if __name__ == "__main__":
    main()
