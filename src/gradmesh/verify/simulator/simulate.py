"""`simulate`: run a program on ranks that are threads, watch every collective, and live a cost model."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch.distributed as dist

from gradmesh.backends.threads.waiting import World
from gradmesh.errors import ArgumentError, RankError, message
from gradmesh.launch import Ranks
from gradmesh.verify.simulator.clocks import OwnClocks, WallClock
from gradmesh.verify.simulator.events import Events
from gradmesh.verify.simulator.lone import Lone
from gradmesh.verify.simulator.model import CostModel
from gradmesh.verify.simulator.schedule import Schedule
from gradmesh.verify.simulator.single_rank import run_single_rank
from gradmesh.verify.simulator.trace import trace_of
from gradmesh.verify.simulator.watching import Watching
from gradmesh.verify.simulator.wire import Wire
from gradmesh.world import mesh as make_mesh

__all__ = ["Simulation", "simulate"]

T = TypeVar("T")


@dataclass(frozen=True)
class Simulation(Generic[T]):
    """What a simulated run has given.

    Attributes:
        world_size: the number of ranks.
        results: what each rank has returned; of the one that played alone; empty where the run failed.
        events: every call of every rank.
        seconds: how long the run took: by the slowest rank's clock where ranks have their own, else by the machine's.
        error: how the run failed, where `check=False` was passed; None: it did not.
    """

    world_size: int
    results: list[T]
    events: Events
    seconds: float
    error: RankError | None

    def __str__(self) -> str:
        """How many ranks, how long, and the table of events."""
        ended = "" if self.error is None else ", which failed"
        return f"a run of {self.world_size} ranks, {self.seconds:.6g} s{ended}\n{self.events}"

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the events as a trace file, which ui.perfetto.dev opens; see `gradmesh.verify.simulator.trace`."""
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
    """Run `fn(*args, **kwargs)` on ranks that are threads of this process, and watch every collective.

    Calls of gradmesh and of torch.distributed are watched, and so are those of DDP, FSDP and DTensor. Without `seed`
    and `only` all ranks run at once and times are the machine's.

    With `seed` one rank runs at a time, and a generator picks the one that goes on whenever a rank makes a call to
    others, waits or ends: the same seed gives the same order, so that an error that depends on it comes back. A
    deadlock is known at once. Each rank has a clock of its own, which goes on while that rank works and is set to a
    call's end when it has waited for it: the time of a run is that of a machine with a core for each rank.

    With `only` one rank plays, and the others are taken to do the same: calls, bytes and modelled times are those of a
    world of any size, values are not.

    Args:
        fn: what each rank runs.
        world_size: the number of ranks.
        args: positional arguments, the same objects for every rank.
        kwargs: keyword arguments, the same objects for every rank.
        mesh: names and sizes of axes, the slowest first, as for `gradmesh.mesh`, which every rank has as its current
            mesh. The events are named by these axes.
        seed: which order of the ranks.
        model: what a collective costs. Its result then comes when it would come: a rank that waits for it sleeps until
            then, or sets its own clock. Where a call is not waited for the rank goes on meanwhile.
        compute: what the time of the ranks' own work is multiplied with, with `seed` or `only`; 1 by default. With 0,
            only communication takes time, and all times are the same in every run.
        only: the rank that plays alone.
        timeout: as for `gradmesh.launch`. With `seed`, ranks that wait for each other in some other way than by a call,
            such as a lock of Python's, are ended by it alone.
        check: whether a failure is raised; else it is `error` of what is returned, with the events until then.

    Raises:
        ArgumentError: arguments that do not fit together; or a call from a thread that is no rank, with `seed`.
        RankError: a rank failed. Its cause is the rank's exception; that of a deadlock has the pending call of every
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
    _refuse_what_does_not_fit(world_size, mesh, seed, compute, only)
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
        wire = Wire(model)
        if only is not None:
            watching.append(Lone(world, OwnClocks(world_size, compute), wire, axes, None))
        elif seed is not None:
            own = OwnClocks(world_size, compute)
            watching.append(Watching(world, own, wire, axes, Schedule(world, seed)))
        else:
            watching.append(Watching(world, WallClock(), wire, axes, None))
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


def _refuse_what_does_not_fit(
    size: int, mesh: Mapping[str, int] | None, seed: int | None, compute: float | None, only: int | None
) -> None:
    if mesh is not None and math.prod(mesh.values()) != size:
        _refuse("the axes do not fill the world", f"sizes with product {size}", f"mesh={dict(mesh)}")
    if only is not None and not 0 <= only < size:
        _refuse("there is no such rank to play alone", f"a rank from 0 to {size - 1}", f"only={only}")
    if only is not None and seed is not None:
        _refuse("one rank that plays alone has no order", "seed= or only=", "both")
    if compute is not None and not 0 <= compute < math.inf:
        _refuse("compute is no factor", "a number that is not negative", f"compute={compute!r}")
    if compute is not None and seed is None and only is None:
        _refuse("the machine's time cannot be scaled", "compute= with seed= or only=", f"compute={compute}")


def _refuse(problem: str, expected: str, got: str) -> None:
    raise ArgumentError(
        message(problem, op="simulate", expected=expected, got=got, remedy="see the arguments of simulate")
    )
