"""Times of the verbs and the raw calls by torch's timer, interleaved, on local ranks."""

from __future__ import annotations

import gc
import timeit
from collections.abc import Callable, Iterator
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from gradmesh.bench import raw
from gradmesh.launch import Ranks
from gradmesh.types import R
from gradmesh.verbs import collectives

if TYPE_CHECKING:
    from torch.utils.benchmark import Measurement, Timer

__all__ = ["FULL", "QUICK", "VERBS", "WAYS", "Cell", "Plan", "measured", "samples"]

WAYS = ("forward", "with backward")
Raw = Callable[[Tensor], raw.Call]

# The verb, and the raw calls of the same collective and of its adjoint, if torch has them.
VERBS: dict[str, tuple[Callable[[Tensor], Tensor], tuple[Raw, Raw] | None]] = {
    "all_gather": (collectives.all_gather, (raw.all_gather, raw.reduce_scatter)),
    "reduce_scatter": (collectives.reduce_scatter, (raw.reduce_scatter, raw.all_gather)),
    "all_reduce": (lambda x: collectives.all_reduce(x, dst=R), (raw.all_reduce, raw.all_reduce)),
    "all_to_all": (collectives.all_to_all, (raw.all_to_all, raw.all_to_all)),
    "broadcast": (collectives.broadcast, (raw.broadcast, raw.reduce)),
    "shift": (collectives.shift, (raw.shift, lambda x: raw.shift(x, offset=-1))),
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
