"""Print what comparing costs: all_gather and its backward at each level of `gradmesh.check`, on each backend.

    python tools/agreement_cost.py
    python tools/agreement_cost.py --step       # a training step on Gloo, at levels 0, "deferred" and 1
    python tools/agreement_cost.py --cpu        # CPU time of the deferred check, of a call and of that step

The levels run in turn on two ranks of this machine, and a cell is the median over the rounds of the slower rank. The
backward is one `autograd.grad` of a result that is kept, with gradients that differ from rank to rank.

The training step is that of a model whose layers sum their results over the ranks, forward and backward, and whose
gradients are averaged by one call each: 48 calls, then a step of SGD, before which the deferred check waits for the
comparison. Each round runs every level, in turn; the ratio is that of the sums over the rounds, of the slower rank.

The CPU time does not depend on the other work of the machine as times do: that of the calling thread for a call and its
backward, that of the check's own threads for a step, and as the share of the CPU time of the whole process in a step at
level 0. The Python calls are those of functions of gradmesh, and the blocks those of Python's allocator that a call
leaves behind until it was compared.
"""

from __future__ import annotations

import os
import platform
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import click
import torch

import gradmesh as gm
from gradmesh.runtime.checking import Level
from gradmesh.runtime.state import rank_state

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


def training_step() -> Callable[[], None]:
    """A training step of this rank."""
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

    return step


def step_times(rounds: int) -> list[list[float]]:
    """Seconds of each training step of this rank, for each of `STEP_LEVELS`."""
    step = training_step()
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


_ROOT = str(Path(gm.__file__).parent)


def _python_calls(run: Callable[[], object]) -> int:
    """How many Python functions of gradmesh this thread enters."""
    found = 0

    def entered(frame: FrameType, event: str, _: object) -> None:
        nonlocal found
        found += event == "call" and frame.f_code.co_filename.startswith(_ROOT)

    sys.setprofile(entered)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


def _of_own_threads() -> float:
    """CPU seconds of the check's threads in this process."""
    threads = [each for each in threading.enumerate() if each.name.startswith("gradmesh deferred check")]
    return sum(time.clock_gettime(time.pthread_getcpuclockid(each.ident or 0)) for each in threads)


def cpu_of_check(rounds: int) -> dict[str, float]:
    """The figures of this rank."""
    x, calls = torch.ones(4, requires_grad=True), 50

    def call() -> None:
        gm.all_reduce(x, dst=gm.R).backward(torch.ones(4))

    found: dict[str, float] = {}
    seconds: dict[Level, list[float]] = {0: [], "deferred": []}
    for turn in range(rounds + 2):
        for level, times in seconds.items():
            with gm.check(level):
                gm.barrier()
                begin, blocks = time.thread_time(), sys.getallocatedblocks()
                for _ in range(calls):
                    call()
                if turn >= 2:
                    times.append((time.thread_time() - begin) / calls / 2)
                found[f"blocks {level}"] = (sys.getallocatedblocks() - blocks) / calls / 2
                if turn == rounds + 1:
                    found[f"entered {level}"] = _python_calls(call) / 2
    found["call"] = min(seconds["deferred"]) - min(seconds[0])
    step = training_step()
    checker: Any = rank_state().deferred_check

    def made() -> int:
        return sum(log.made for log in checker.logs.values())

    for _ in range(2):
        step()
    gm.barrier()
    with gm.check(0):
        begin = time.process_time()
        for _ in range(rounds):
            step()
        found["step"] = (time.process_time() - begin) / rounds
    with gm.check("deferred"):
        gm.barrier()
        before, own = made(), _of_own_threads()
        for _ in range(rounds):
            step()
        found["own"] = (_of_own_threads() - own) / rounds
        found["calls"] = (made() - before) / rounds
    return found


def show_cpu(rounds: int) -> None:
    """Print the CPU time of the deferred check."""
    ranks = gm.launch(cpu_of_check, 2, backend="gloo", args=(rounds,))
    print("| | rank 0 | rank 1 |\n|---|---|---|")
    share = [(one["calls"] * one["call"] + one["own"]) / one["step"] for one in ranks]
    rows = {
        "calling thread, us of a call": [1e6 * one["call"] for one in ranks],
        "Python calls of a call: level 0": [one["entered 0"] for one in ranks],
        "Python calls of a call: deferred": [one["entered deferred"] for one in ranks],
        "blocks that a call leaves: level 0": [one["blocks 0"] for one in ranks],
        "blocks that a call leaves: deferred": [one["blocks deferred"] for one in ranks],
        "calls of a step": [one["calls"] for one in ranks],
        "its own threads, us of a step": [1e6 * one["own"] for one in ranks],
        "a step at level 0, ms of CPU": [1e3 * one["step"] for one in ranks],
        "share of the check, %": [100 * each for each in share],
    }
    for name, values in rows.items():
        print(f"| {name} | {' | '.join(f'{value:.2f}' for value in values)} |", flush=True)


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
@click.option("--cpu", is_flag=True, help="Measure the CPU time of the deferred check.")
@click.option("--backend", "backends", multiple=True, default=("threads", "shm", "gloo"))
def main(rounds: int, backends: tuple[str, ...], step: bool, cpu: bool) -> None:
    """Print the table."""
    print(f"torch {torch.__version__.split('+')[0]}, {platform.machine()}, {os.cpu_count()} cores, 2 ranks\n")
    if step or cpu:
        (show_step if step else show_cpu)(rounds)
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
