"""Print where the time of all_gather goes on two shm processes: from the copies up to the verb and its gradient.

Each row adds a layer to the one before it. A figure is the median over the rounds of the slower rank, the rows in turn.
`waiting` is the part of the row in which the rank waited for the other one; `faults` are the pages that the system had
to hand out in one call.
"""

from __future__ import annotations

import os
import platform
import resource
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import gradmesh as gm
from gradmesh.backends.shm import engine

SIZES = (4, 512 << 10, 4 << 20, 32 << 20)
"""Bytes on each rank."""
ROUNDS = 9
Row = tuple[float, float, float]
# torch 2.13 renamed both; the old names only warn there.
gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _Nothing(torch.autograd.Function):
    """What autograd itself takes for a Function of Python."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # noqa: ARG004 - torch's names
        return grad


def measure(size: int) -> dict[str, Row]:
    """Microseconds, microseconds of waiting and page faults of one call, for each layer."""
    count, ranks = size // 4, dist.get_world_size()
    x, out = torch.ones(count), torch.empty(ranks * count)
    part = torch.empty(count)
    needy = x.clone().requires_grad_()
    gathered, nothing = gm.all_gather(needy), _Nothing.apply(needy)  # type: ignore[no-untyped-call]
    back, same = torch.ones_like(gathered), torch.ones(count)
    rows: dict[str, Callable[[], object]] = {
        "the copies alone": lambda: out.view(ranks, count).copy_(x),
        "the raw all_gather": lambda: gather(out, x),
        "gm.all_gather, no gradient": lambda: gm.all_gather(x),
        "gm.all_gather": lambda: gm.all_gather(needy),
        "the sum alone": lambda: torch.add(out[:count], out[count : 2 * count], out=part),
        "the raw reduce_scatter": lambda: scatter(part, out),
        "autograd.grad of a Function that does nothing": lambda: torch.autograd.grad(
            nothing, needy, same, retain_graph=True
        ),
        "autograd.grad of gm.all_gather": lambda: torch.autograd.grad(
            gathered, needy, back, retain_graph=True
        ),
    }
    number = max(1, min(300, (8 << 20) // size))
    taken: dict[str, list[Row]] = {name: [] for name in rows}
    waited = _watch_waiting()
    for turn in range(ROUNDS + 1):
        for name, call in rows.items():
            call()
            dist.barrier()
            waited.clear()
            faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            begin = time.perf_counter()
            for _ in range(number):
                call()
            seconds = time.perf_counter() - begin
            faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
            if turn:
                taken[name].append((1e6 * seconds / number, 1e6 * sum(waited) / number, faults / number))
    return {name: tuple(map(statistics.median, zip(*found, strict=True))) for name, found in taken.items()}


def _watch_waiting() -> list[float]:
    """A list that gets the seconds of every wait of this process."""
    waited: list[float] = []
    wait = getattr(engine.Engine._wait, "watched", engine.Engine._wait)

    def watch(*arguments: Any, **more: Any) -> None:
        begin = time.perf_counter()
        try:
            wait(*arguments, **more)
        finally:
            waited.append(time.perf_counter() - begin)

    watch.watched = wait  # type: ignore[attr-defined]
    engine.Engine._wait = watch  # type: ignore[method-assign]
    return waited


def main() -> None:
    """Print the tables, as Markdown."""
    print(f"torch {torch.__version__}, {platform.machine()}, {os.cpu_count()} cores, 2 shm processes")
    with gm.Ranks(2, backend="shm") as ranks:
        for size in SIZES:
            found = ranks.run(measure, size)
            print(f"\n| {size:,} bytes a rank | us | waiting, us | faults |\n|---|---|---|---|")
            for name in found[0]:
                total, engine, faults = max(each[name] for each in found)
                print(f"| {name} | {total:,.1f} | {engine:,.1f} | {faults:,.1f} |")


if __name__ == "__main__":
    main()
