"""`simulate`: runs a program on thread ranks, records every collective, and applies a cost model."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, NoReturn, TypeVar

import torch.distributed as dist

from gradmesh.backends.threads.waiting import World
from gradmesh.errors import ArgumentError, RankError, message
from gradmesh.launch import Ranks
from gradmesh.verify.simulator.clocks import VirtualClocks, WallClock
from gradmesh.verify.simulator.events import Events
from gradmesh.verify.simulator.links import Links
from gradmesh.verify.simulator.model import CostModel
from gradmesh.verify.simulator.schedule import Schedule
from gradmesh.verify.simulator.single_rank import SingleRankObserver, run_single_rank
from gradmesh.verify.simulator.trace import trace_of
from gradmesh.verify.simulator.watching import Watching
from gradmesh.world import mesh as make_mesh

__all__ = ["Simulation", "simulate"]

T = TypeVar("T")


@dataclass(frozen=True)
class Simulation(Generic[T]):
    """The result of a simulated run.

    Attributes:
        world_size: the number of ranks.
        results: each rank's return value; with `only`, that of the one rank; empty if the run failed.
        events: every call of every rank.
        seconds: the duration of the run: the slowest rank's virtual clock with `seed` or `only`, else wall-clock time.
        error: the failure, with `check=False`; None if the run succeeded.
    """

    world_size: int
    results: list[T]
    events: Events
    seconds: float
    error: RankError | None

    def __str__(self) -> str:
        """The number of ranks, the duration, and the table of events."""
        ended = "" if self.error is None else ", failed"
        return f"simulation of {self.world_size} ranks, {self.seconds:.6g} s{ended}\n{self.events}"

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the events as a trace file for ui.perfetto.dev; see `gradmesh.verify.simulator.trace`."""
        with open(path, "w") as file:
            json.dump(trace_of(self.events), file)


def simulate(
    fn: Callable[..., T],
    world_size: int,
    *,
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    mesh: Mapping[str, int] | None = None,
    seed: int | None = None,
    model: CostModel | None = None,
    compute: float | None = None,
    only: int | None = None,
    timeout: float | None = None,
    check: bool = True,
) -> Simulation[T]:
    """Run `fn(*args, **kwargs)` on thread ranks of this process, and record every collective.

    Calls of gradmesh and torch.distributed are recorded, including those of DDP, FSDP and DTensor. Without `seed` and
    `only` all ranks run concurrently and times are wall-clock times.

    With `seed` one rank runs at a time. Whenever a rank communicates, waits or returns, a generator picks the next one:
    the same seed gives the same order, so that errors that depend on it are reproducible. A deadlock is reported
    immediately. Each rank has a virtual clock, which advances while that rank runs and is set to the end of a call when
    the rank has waited for it: times are those of a machine with one core per rank.

    With `only` a single rank runs, and all others are assumed to do the same: calls, bytes and modelled times are those
    of a world of any size; values are not.

    Args:
        fn: the function that each rank runs.
        world_size: the number of ranks.
        args: positional arguments, the same objects for every rank.
        kwargs: keyword arguments, the same objects for every rank.
        mesh: names and sizes of axes, the slowest first, as for `gradmesh.mesh`; it becomes the current mesh of every
            rank, and events are named by its axes.
        seed: the seed of the order of the ranks.
        model: the cost of collectives. A rank that waits for a result sleeps until the call's modelled end, or sets its
            virtual clock to it. The time of an asynchronous call overlaps with computation.
        compute: the factor of the ranks' computation time, with `seed` or `only`; defaults to 1. With 0 only
            communication takes time, and all times are reproducible.
        only: the only rank to run.
        timeout: as for `gradmesh.launch`. With `seed`, ranks that wait for each other by other means than a collective,
            such as a Python lock, are only ended by this timeout.
        check: whether to raise if a rank fails; otherwise the failure is the `error` of the result, which has the
            events until then.

    Raises:
        ArgumentError: invalid arguments; or, with `seed`, a call from a thread that does not belong to a rank.
        RankError: a rank failed. Its cause is the rank's exception; for a deadlock it lists the pending call of every
            rank with its line.

    Example:
        >>> def on_each_rank():
        ...     x = torch.full((3,), float(gm.rank()), requires_grad=True)
        ...     gm.all_gather(x).square().sum().backward()
        ...     return x.grad.tolist()
        >>> run = gm.verify.simulate(on_each_rank, 4, seed=7)
        >>> run.results[2]
        [16.0, 16.0, 16.0]
        >>> [(e.verb, e.phase, e.payload, e.sent) for e in run.events.select(rank=2)]
        [('all_gather', 'forward', 12, 36), ('reduce_scatter', 'backward', 48, 36)]
    """
    _check_arguments(world_size, mesh, seed, compute, only)
    axes = dict(mesh or {})
    compute = 1.0 if compute is None else compute
    watching: list[Watching] = []

    def prepare() -> World:
        if axes:
            make_mesh(**axes)
        return dist.group.WORLD.shared.world  # type: ignore[union-attr, no-any-return]

    def on_rank() -> T:
        rank = dist.get_rank()
        with watching[0].taking_part(rank):
            return fn(*args, **(kwargs or {}))

    def watch(world: World) -> None:
        links = Links(model)
        if only is not None:
            watching.append(SingleRankObserver(world, VirtualClocks(world_size, compute), links, axes, None))
        elif seed is not None:
            clocks = VirtualClocks(world_size, compute)
            watching.append(Watching(world, clocks, links, axes, Schedule(world, seed)))
        else:
            watching.append(Watching(world, WallClock(), links, axes, None))
        world.observer = watching[0]

    results, error = [], None
    try:
        if only is not None:
            results = [run_single_rank(world_size, only, prepare, watch, on_rank, timeout)]
        else:
            with Ranks(world_size, backend="threads", timeout=timeout) as ranks:
                world = ranks.run(prepare)[0]
                watch(world)
                try:
                    results = ranks.run(on_rank)
                finally:
                    world.observer = None
    except RankError as failed:
        if check or not watching:
            raise
        error = failed
    seen = watching[0]
    return Simulation(world_size, results, Events(seen.notes.events), seen.seconds, error)


def _check_arguments(
    size: int, mesh: Mapping[str, int] | None, seed: int | None, compute: float | None, only: int | None
) -> None:
    if mesh is not None and math.prod(mesh.values()) != size:
        _refuse(
            "the mesh does not match the world size",
            f"axis sizes whose product is {size}",
            f"mesh={dict(mesh)}",
            f"pass e.g. mesh={{'world': {size}}}, or world_size={math.prod(mesh.values())}",
        )
    if only is not None and not 0 <= only < size:
        _refuse("only is out of range", f"a rank from 0 to {size - 1}", f"only={only}", "pass e.g. only=0")
    if only is not None and seed is not None:
        _refuse(
            "seed and only exclude each other",
            "seed= or only=",
            f"seed={seed}, only={only}",
            "remove seed=: a single rank needs no order",
        )
    if compute is not None and not 0 <= compute < math.inf:
        _refuse(
            "invalid compute",
            "a finite number >= 0",
            f"compute={compute!r}",
            "pass compute=0 to count communication only, or compute=1 for the measured time",
        )
    if compute is not None and seed is None and only is None:
        _refuse(
            "compute= requires virtual clocks",
            "compute= together with seed= or only=",
            f"compute={compute}",
            f"pass e.g. seed=0, compute={compute}",
        )


def _refuse(problem: str, expected: str, got: str, remedy: str) -> NoReturn:
    raise ArgumentError(message(problem, op="simulate", expected=expected, got=got, remedy=remedy))
