"""Print what comparing costs: all_gather and its backward at each level of `gradmesh.check`, on each backend.

    python tools/agreement_cost.py
    python tools/agreement_cost.py --step       # a training step on Gloo, at levels 0, "deferred" and 1

The levels run in turn on two ranks of this machine, and a cell is the median over the rounds of the slower rank. The
backward is one `autograd.grad` of a result that is kept, with gradients that differ from rank to rank.

The training step is that of a model whose layers sum their results over the ranks, forward and backward, and whose
gradients are averaged by one call each: 48 calls, then a step of SGD, before which the deferred check waits for the
comparison. Each round runs every level, in turn; the ratio is that of the sums over the rounds, of the slower rank.
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


WIDTH, DEPTH, BATCH = 768, 8, 256
STEP_LEVELS: tuple[Level, ...] = (0, "deferred", 1)


def step_times(rounds: int) -> list[list[float]]:
    """Seconds of each training step of this rank, for each of `STEP_LEVELS`."""
    torch.manual_seed(gm.rank())
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)]
    weights = [p for layer in layers for p in layer.parameters()]
    optimizer = torch.optim.SGD(weights, lr=1e-3)
    x = torch.randn(BATCH, WIDTH)

    def step() -> None:
        optimizer.zero_grad()
        y = x
        for layer in layers:
            y = gm.all_reduce(torch.relu(layer(gm.replicate(y))), dst=gm.I, op="mean")
            y = y + gm.all_reduce(y.mean(0), dst=gm.R, op="mean")
        y.square().mean().backward()
        for p in weights:
            assert p.grad is not None
            p.grad = gm.all_reduce(p.grad, dst=gm.I, op="mean")
        optimizer.step()

    times: list[list[float]] = [[] for _ in STEP_LEVELS]
    for turn in range(rounds + 2):
        for at in (range(len(STEP_LEVELS)), reversed(range(len(STEP_LEVELS))))[turn % 2]:
            with gm.check(STEP_LEVELS[at]):
                torch.distributed.barrier()
                begin = time.perf_counter()
                step()
                if turn >= 2:
                    times[at].append(time.perf_counter() - begin)
    return times


def show_step(rounds: int) -> None:
    """Print the time of a training step at each level."""
    ranks = gm.launch(step_times, 2, backend="gloo", args=(rounds,))
    slower = [[max(pair) for pair in zip(*times, strict=True)] for times in zip(*ranks, strict=True)]
    print("| level | step, ms (median) | ratio of the medians | ratio of the means |\n|---|---|---|---|")
    for level, times in zip(STEP_LEVELS, slower, strict=True):
        ratio = statistics.median(times) / statistics.median(slower[0])
        means = statistics.fmean(times) / statistics.fmean(slower[0])
        print(f"| {level} | {1e3 * statistics.median(times):.2f} | {ratio:.3f} | {means:.3f} |", flush=True)


@click.command(help=__doc__.splitlines()[0] if __doc__ else None)
@click.option("--rounds", default=40, show_default=True, help="How often each is measured.")
@click.option("--step", is_flag=True, help="Measure a training step on Gloo.")
@click.option("--backend", "backends", multiple=True, default=("threads", "shm", "gloo"))
def main(rounds: int, backends: tuple[str, ...], step: bool) -> None:
    """Print the table."""
    print(f"torch {torch.__version__.split('+')[0]}, {platform.machine()}, {os.cpu_count()} cores, 2 ranks\n")
    if step:
        show_step(rounds)
        return
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
