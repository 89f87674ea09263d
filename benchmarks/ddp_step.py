"""A training step of DistributedDataParallel on shm beside Gloo: `python -m benchmarks.ddp_step`.

A step is forward, backward with DDP's all_reduce of the gradients, and SGD, of a perceptron with layers of one size.
The columns are measured in turn in the same processes, step by step; a figure is the median over the steps of the
slower rank, with the quartiles behind it.

* alone: the same step without DDP, which is the floor.
* shm, in line: each bucket is waited for immediately after its launch.
* shm, gloo: unmodified DDP.
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradmesh as gm

MODELS = {"0.1 M": (6, 128, 64), "4 M": (4, 1024, 32), "25 M": (6, 2048, 16)}
"""Parameters, as layers, width and rows of a batch."""
RANKS = (2, 4)
COLUMNS = ("alone", "shm", "shm, in line", "gloo")


def _in_line(group: dist.ProcessGroup, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """Sum a bucket and wait for it."""
    tensor = bucket.buffer().div_(group.size())
    dist.all_reduce(tensor, group=group)
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(tensor)
    return future


_in_line.__annotations__ = {}  # DDP compares them with its own


def measure(layers: int, width: int, rows: int, steps: int) -> dict[str, list[float]]:
    """Milliseconds of each step on this rank, for each column."""
    torch.set_num_threads(1)
    gloo = dist.new_group(backend="gloo")
    groups = {"alone": None, "shm": dist.group.WORLD, "shm, in line": dist.group.WORLD, "gloo": gloo}
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(dist.get_rank()))
    step: dict[str, Callable[[], None]] = {}
    for name, group in groups.items():
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(layers)])
        if group is not None:
            model = DistributedDataParallel(model, process_group=group)
            if name == "shm, in line":
                model.register_comm_hook(group, _in_line)
        step[name] = _step(model, x)
    taken: dict[str, list[float]] = {name: [] for name in COLUMNS}
    for turn in range(steps + 3):
        for name in COLUMNS:
            dist.barrier()
            begin = time.perf_counter()
            step[name]()
            if turn >= 3:  # before, the buckets are put into order and memory is touched
                taken[name].append(1e3 * (time.perf_counter() - begin))
    # A Gloo group that dies with the last model on it joins its threads with the interpreter's lock held, which one of
    # them may be waiting for.
    del model, step
    gc.collect()
    dist.destroy_process_group(gloo)
    return taken


def _step(model: nn.Module, x: torch.Tensor) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    weight = dist.get_rank() + 1

    def run() -> None:
        optimizer.zero_grad(set_to_none=False)
        (model(x).square().mean() * weight).backward()
        optimizer.step()

    return run


def _shown(times: list[float]) -> str:
    first, median, third = statistics.quantiles(times, n=4)
    return f"{median:.3g} ({first:.3g} to {third:.3g})"


def main() -> None:
    """Print the table, as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40, help="steps of each kind")
    steps = parser.parse_args().steps
    print(f"torch {torch.__version__}, {platform.machine()}, {os.cpu_count()} cores, one thread a rank, ms\n")
    print(f"| ranks | parameters | {' | '.join(COLUMNS)} | gloo : shm |\n|{'---|' * (len(COLUMNS) + 3)}")
    for size in RANKS:
        with gm.Ranks(size, backend="shm") as ranks:
            for name, (layers, width, rows) in MODELS.items():
                found = ranks.run(measure, layers, width, rows, steps)
                slower = {
                    column: [max(times) for times in zip(*(each[column] for each in found), strict=True)]
                    for column in COLUMNS
                }
                ratio = statistics.median(slower["gloo"]) / statistics.median(slower["shm"])
                shown = " | ".join(_shown(slower[column]) for column in COLUMNS)
                print(f"| {size} | {name} | {shown} | {ratio:.1f} |", flush=True)


if __name__ == "__main__":
    main()
