"""`gradmesh bench`: times of the verbs, and their overhead over raw calls of torch.distributed.

Both are timed by torch's timer, interleaved, on local ranks. The `raw_` functions take this rank's 1-d operand and a
group, and return a call that returns the result, in preallocated memory. Collectives that work in place (all_reduce,
broadcast, reduce) work on a copy of the operand, which changes with every call.
"""

from __future__ import annotations

import gc
import json
import shutil
import sys
import timeit
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from gradmesh.launch import Ranks
from gradmesh.types import R
from gradmesh.verbs import collectives

if TYPE_CHECKING:
    from torch.utils.benchmark import Measurement, Timer


RawCall = Callable[[], Tensor]
Group = dist.ProcessGroup | None

# torch 2.13 renamed both, and the old names warn there.
_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def raw_all_gather(x: Tensor, group: Group = None) -> RawCall:
    """The concatenated operands of all ranks."""
    return _into(x.new_empty(x.numel() * dist.get_world_size(group)), _gather_single, x, group=group)


def raw_reduce_scatter(x: Tensor, group: Group = None) -> RawCall:
    """This rank's part of the sum."""
    return _into(x.new_empty(x.numel() // dist.get_world_size(group)), _scatter_single, x, group=group)


def raw_all_reduce(x: Tensor, group: Group = None) -> RawCall:
    """The sum."""
    return _into(x.clone(), dist.all_reduce, group=group)


def raw_all_to_all(x: Tensor, group: Group = None) -> RawCall:
    """This rank's part of every operand."""
    return _into(x.new_empty(x.numel()), dist.all_to_all_single, x, group=group)


def raw_broadcast(x: Tensor, group: Group = None, root: int = 0) -> RawCall:
    """The root's operand."""
    return _into(x.clone(), dist.broadcast, group_src=root, group=group)


def raw_reduce(x: Tensor, group: Group = None, root: int = 0) -> RawCall:
    """The sum, at the root."""
    return _into(x.clone(), dist.reduce, group_dst=root, group=group)


def raw_shift(x: Tensor, group: Group = None, offset: int = 1) -> RawCall:
    """The operand of the rank `offset` before."""
    out, rank, size = x.new_empty(x.numel()), dist.get_rank(group), dist.get_world_size(group)
    send = dist.P2POp(dist.isend, x, group=group, group_peer=(rank + offset) % size)
    receive = dist.P2POp(dist.irecv, out, group=group, group_peer=(rank - offset) % size)
    return _into(out, lambda _: [work.wait() for work in dist.batch_isend_irecv([send, receive])])


def _into(out: Tensor, collective: Callable[..., object], *operands: Tensor, **options: object) -> RawCall:
    move = partial(collective, out, *operands, **options)

    def call() -> Tensor:
        move()
        return out

    return call


WAYS = ("forward", "with backward")
Raw = Callable[[Tensor], RawCall]

# The verb, and the raw calls of the same collective and of its adjoint, if torch has them.
VERBS: dict[str, tuple[Callable[[Tensor], Tensor], tuple[Raw, Raw] | None]] = {
    "all_gather": (collectives.all_gather, (raw_all_gather, raw_reduce_scatter)),
    "reduce_scatter": (collectives.reduce_scatter, (raw_reduce_scatter, raw_all_gather)),
    "all_reduce": (lambda x: collectives.all_reduce(x, dst=R), (raw_all_reduce, raw_all_reduce)),
    "all_to_all": (collectives.all_to_all, (raw_all_to_all, raw_all_to_all)),
    "broadcast": (collectives.broadcast, (raw_broadcast, raw_reduce)),
    "shift": (collectives.shift, (raw_shift, lambda x: raw_shift(x, offset=-1))),
    "halo_exchange": (collectives.halo_exchange, None),
    "scan": (collectives.scan, None),
}


class Plan(NamedTuple):
    """Bytes of a rank's float32 operand; rounds; seconds of a sample (too short ones measure the ranks' skew)."""

    sizes: dict[str, int]
    rounds: int
    seconds: float


QUICK = Plan({"1 KiB": 2**10, "1 MiB": 2**20}, rounds=7, seconds=0.01)
FULL = Plan({"1 KiB": 2**10, "64 KiB": 2**16, "1 MiB": 2**20, "16 MiB": 2**24}, rounds=15, seconds=0.025)


class Cell(NamedTuple):
    """The times of a verb and of its raw call, if there is one, at a size, for one of `WAYS`."""

    verb: str
    size: str
    way: str
    ours: Measurement
    raw: Measurement | None

    @property
    def added(self) -> tuple[float, float] | None:
        """The verb's overhead: the median of the rounds' differences in seconds, and the ratio of the medians."""
        if self.raw is None:
            return None
        longer = median(ours - raw for ours, raw in zip(self.ours.times, self.raw.times, strict=True))
        return longer, self.ours.median / self.raw.median


def measured(ranks: int, backend: str, plan: Plan, progress: Callable[[str], object]) -> Iterator[Cell]:
    """Time every verb at every size, each round on the slowest rank; calls `progress` with a line of text."""
    # Imported late: torch.utils.benchmark initializes CUDA, which may warn.
    from torch.utils.benchmark import Measurement
    from torch.utils.benchmark.utils.common import TaskSpec

    collecting = gc.isenabled()
    progress(f"starting {ranks} ranks on {backend}")
    try:
        with Ranks(ranks, backend) as pool:
            for step, (verb, size) in enumerate(((verb, size) for verb in VERBS for size in plan.sizes), 1):
                progress(f"[{step}/{len(VERBS) * len(plan.sizes)}] {verb}, {size}")
                found = pool.run(samples, verb, plan.sizes[size], plan.rounds, plan.seconds)
                slowest = [[max(t) for t in zip(*calls, strict=True)] for calls in zip(*found, strict=True)]
                taken = [Measurement(1, times, TaskSpec(stmt=verb, setup="")) for times in slowest]
                for way, ours, others in zip(WAYS, taken[:2], taken[2:] or (None, None), strict=True):
                    yield Cell(verb, size, way, ours, others)
    finally:
        gc.enable() if collecting else gc.disable()  # concurrent timers in several threads leave it disabled


def samples(verb: str, size: int, rounds: int, seconds: float) -> list[list[float]]:
    """On a rank: the seconds of a call in each round, for each of `WAYS`, of the verb and of the raw call."""
    from torch.utils.benchmark import Timer
    from torch.utils.benchmark.utils.timer import timer as device_clock

    device = torch.device("cuda" if "nccl" in dist.get_backend() else "cpu")
    x = torch.ones(-(-size // 4 // dist.get_world_size()) * dist.get_world_size(), device=device)
    clock = timeit.default_timer if device.type == "cpu" else device_clock
    timers = [Timer("call()", globals={"call": call}, timer=clock) for call in _calls(verb, x)]

    def sample(timer: Timer, number: int) -> float:
        dist.barrier()
        # timeit calls at least twice before it starts the clock, which synchronizes the ranks.
        return timer.timeit(number).mean

    numbers = [1] * len(timers)
    for _ in range(2):  # the second estimate averages several calls
        for at, timer in enumerate(timers):
            fitting = torch.tensor(seconds / sample(timer, numbers[at]), device=device)
            dist.all_reduce(fitting, op=dist.ReduceOp.MIN)
            numbers[at] = min(1000, max(1, round(fitting.item())))
    # Interleaved, so that other load on the machine affects all timers equally.
    taken = [[sample(*each) for each in zip(timers, numbers, strict=True)] for _ in range(rounds)]
    return [list(times) for times in zip(*taken, strict=True)]


def _calls(name: str, x: Tensor) -> list[Callable[[], object]]:
    verb, others = VERBS[name]
    leaf = x.clone().requires_grad_()
    cotangent = verb(x)

    def both() -> object:
        y = verb(leaf)
        return y, torch.autograd.grad(y, leaf, cotangent)

    if others is None:
        return [lambda: verb(leaf), both]
    there, back = others[0](x), others[1](cotangent)
    return [lambda: verb(leaf), both, there, lambda: (there(), back())]


_NOTE = (
    "Microseconds per call on the slowest rank: median (interquartile range). raw: the call of torch.distributed into "
    "preallocated memory; its backward is a call of the adjoint collective. gradmesh allocates the result, builds the "
    "autograd graph and compares the ranks' calls (GRADMESH_CHECK). added: median of the rounds' differences. ratio: "
    "gradmesh's median divided by raw's. size: of a rank's operand."
)


def bench(backend: str, ranks: int, quick: bool, json_path: Path | None) -> None:
    """Time the verbs, print the table, and write every round's seconds to a file."""
    from rich.console import Console
    from rich.table import Table

    if json_path is not None:
        json_path.touch()  # fail before the measurement if the file cannot be written
    plan, progress = QUICK if quick else FULL, partial(print, file=sys.stderr, flush=True)
    table, cells = Table(title=f"{ranks} ranks on {backend}", title_justify="left", box=None), []
    for column in ("collective", "pass", "size", "gradmesh", "raw", "added", "ratio"):
        is_text = column in ("collective", "pass")
        table.add_column(column, justify="left" if is_text else "right", no_wrap=is_text)
    for cell in measured(ranks, backend, plan, progress):
        added = () if cell.added is None else (f"{1e6 * cell.added[0]:+.1f}", f"{cell.added[1]:.2f}")
        table.add_row(cell.verb, cell.way, cell.size, _formatted(cell.ours), _formatted(cell.raw), *added)
        times = {"ours": cell.ours.times, "raw": cell.raw and cell.raw.times, "added": cell.added}
        cells.append({**cell._asdict(), **times})
    console = Console(highlight=False, width=shutil.get_terminal_size((100, 24)).columns)
    console.print(table)
    console.print(_NOTE, style="dim")
    if json_path is not None:
        found = {"torch": torch.__version__, "backend": backend, "ranks": ranks, "unit": "s", "cells": cells}
        json_path.write_text(json.dumps(found) + "\n")


def _formatted(times: Measurement | None) -> str:
    return "" if times is None else f"{1e6 * times.median:.1f} ({1e6 * times.iqr:.1f})"
