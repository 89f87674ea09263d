"""`simulate`: runs a program on thread ranks, records every collective, and applies a cost model.

A call is recorded when a rank makes it, and gets its times when the last rank has made it. With a schedule, a rank
yields at each call. With a cost model, a rank that waits for a call continues at the call's modelled end.

Runs a single rank of a large world, assuming that all other ranks do the same.
The data of other ranks is made up from this rank's input: they contribute the same terms and send the same parts. So
calls, sizes, bytes and modelled times are those of this rank in the full world; the values are not. If sizes depend on
received values, this rank's values count. Point-to-point messages raise, since their other end does not exist.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, NoReturn, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from gradmesh import _torch
from gradmesh.backends import threads
from gradmesh.backends.threads.rendezvous import (
    Contribution,
    Group,
    Observer,
    Receive,
    Rendezvous,
    Waitable,
    World,
    write,
)
from gradmesh.errors import ArgumentError, DeadlockError, RankError, message
from gradmesh.launch import Ranks
from gradmesh.runtime.mesh import mesh as make_mesh
from gradmesh.runtime.state import RankState
from gradmesh.verify.simulator.costs import Clock, CostModel, Links, VirtualClocks
from gradmesh.verify.simulator.trace import Event, Events, Notes, op_of, trace_of

_LOOK = 0.2
"""Seconds after which a waiting rank checks whether the world was stopped."""


class Schedule:
    """The scheduler of a world."""

    def __init__(self, world: World, seed: int) -> None:
        self._world = world
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._inside: list[int] = []
        self._turns = [threading.Lock() for _ in range(world.size)]
        for turn in self._turns:
            turn.acquire()

    def current_rank(self) -> int:
        """The rank of the calling thread."""
        rank = self._world.rank_of_thread.get(threading.get_ident())
        if rank is None:
            raise ArgumentError.of(
                "with seed=, a rank may communicate only from its main thread",
                op="simulate",
                expected="a call from the thread of a rank",
                got=f"a call from thread {threading.current_thread().name!r}",
                remedy="make the call in the rank's main thread, or simulate without seed=",
            )
        return rank

    def enter(self, rank: int) -> None:
        """Wait until all ranks have entered, and for the first turn."""
        with self._lock:
            self._inside.append(rank)
            if len(self._inside) == self._world.size:
                self._inside.sort()
                self._run_next()
        self._wait_for_turn(rank)

    def turn(self, rank: int) -> None:
        """Yield to another rank, or continue."""
        self._world.check()
        self._run_next()
        self._wait_for_turn(rank)

    def block(self, rank: int, waits_for: Waitable) -> None:
        """Yield to other ranks until `waits_for` is complete."""
        self._world.check()
        self._world.waiting[rank] = waits_for
        try:
            self._run_next()
            self._wait_for_turn(rank)
        finally:
            self._world.waiting.pop(rank, None)

    def leave(self, rank: int, error: BaseException | None) -> None:
        """The rank's function has returned or raised."""
        self._world.leave(rank, error)
        with self._lock:
            if rank in self._inside:
                self._inside.remove(rank)
        if self._world.stopped is not None:
            self._wake()
        elif self._inside:
            self._run_next()

    def _run_next(self) -> None:
        """Let a ready rank run."""
        waiting = self._world.waiting
        ready = [rank for rank in self._inside if rank not in waiting or waiting[rank].done]
        if ready:
            self._turns[self._random.choice(ready)].release()
        else:
            world = self._world
            with world.lock:
                stuck = list(world.waiting.values())
                first = next((waits_for for waits_for in stuck if world.lost(waits_for)), stuck[0])
                world.stop_now(functools.partial(DeadlockError, str(world.deadlock(first.hopeless()))))
            self._wake()

    def _wait_for_turn(self, rank: int) -> None:
        while not self._turns[rank].acquire(timeout=_LOOK):
            if self._world.stopped is not None:
                break
        self._world.check()

    def _wake(self) -> None:
        """Wake all ranks, so that they see that the world has been stopped."""
        with self._lock:
            for turn in self._turns:
                if turn.locked():
                    turn.release()


Kernel = Callable[[list[Contribution]], None]


@dataclass
class _Call:
    """A call: the event of each rank that has made it, and its end."""

    events: dict[int, Event] = field(default_factory=dict)
    end: float | None = None


class Watching(Observer):
    """Observes a world."""

    def __init__(
        self, world: World, clock: Clock, links: Links, mesh: Mapping[str, int], schedule: Schedule | None
    ) -> None:
        self.clock, self.links, self.notes = clock, links, Notes(mesh)
        self.seconds = 0.0  # when the last rank's function returned
        self._world, self._schedule = world, schedule
        self._calls: dict[tuple[Group, int], _Call] = {}
        self._of: WeakKeyDictionary[Waitable, _Call] = WeakKeyDictionary()
        self._messages: dict[int, tuple[Contribution, float]] = {}
        self._free: dict[tuple[Group, int], float] = {}

    @property
    def lives(self) -> bool:
        """Whether modelled times elapse in wall-clock time."""
        return self.links.model is not None and not self.clock.of_ranks

    @property
    def takes_turns(self) -> bool:
        """Whether each rank has a virtual clock."""
        return self.clock.of_ranks

    def async_axis(self, group: Group, run: Callable[[], None]) -> Callable[[], None]:
        """Run it now, after earlier async calls of the group, and set the rank's clock back to the launch."""
        with self._off_the_clock() as rank:
            if rank is None:
                run()
                return lambda: None
            key, launched = (group, rank), self.clock.now(rank)
            self.clock.put(rank, max(launched, self._free.get(key, 0.0)))
            self.clock.resume(rank)
            run()
            self.clock.pause(rank)
            end = self._free[key] = self.clock.now(rank)
            self.clock.put(rank, launched)

        def wait() -> None:
            with self._off_the_clock():
                self.clock.until(rank, end, self._world.check)

        return wait

    # -- a rank's function

    @contextlib.contextmanager
    def taking_part(self, rank: int) -> Iterator[None]:
        """The context of a rank's function."""
        failed: BaseException | None = None
        try:
            if self._schedule is not None:
                self._schedule.enter(rank)
            self.clock.resume(rank)
            try:
                yield
            finally:
                self.clock.pause(rank)
                self.seconds = max(self.seconds, self.clock.now(rank))
        except BaseException as error:
            failed = error
            raise
        finally:
            if self._schedule is not None:
                self._schedule.leave(rank, failed)

    @contextlib.contextmanager
    def _off_the_clock(self) -> Iterator[int | None]:
        """Stop the rank's clock while the simulator runs."""
        if self._schedule is None:
            rank = self._world.rank_of_thread.get(threading.get_ident())
        else:
            rank = self._schedule.current_rank()
        if rank is None:
            yield None
            return
        self.clock.pause(rank)
        try:
            yield rank
        finally:
            self.clock.resume(rank)

    def _turn(self, rank: int | None) -> None:
        if self._schedule is not None and rank is not None:
            self._schedule.turn(rank)

    # -- what a rank calls

    def meet(self, group: Group, place: int, part: Contribution, kernel: Kernel) -> Rendezvous:
        """Record the call; its end is set when all ranks have made it."""
        with self._off_the_clock() as rank:
            self._turn(rank)
            key = group, group.calls[place]
            call = self._calls.setdefault(key, _Call())
            call.events[group.ranks[place]] = self.notes.note(group, place, part, self.clock.now(rank))

            def carried() -> None:
                del self._calls[key]
                call.end = self.links.collective(list(call.events.values()), self.clock.now(None))

            meeting = self._bring(group, place, part, kernel, carried)
            self._of[meeting] = call
            return meeting

    def _bring(
        self, group: Group, place: int, part: Contribution, kernel: Kernel, carried: Callable[[], None]
    ) -> Rendezvous:
        """Make the call; `carried` runs when all ranks have made it, before any of them continues."""

        def work(parts: list[Contribution]) -> None:
            kernel(parts)
            carried()

        return group.meet(place, part, work, observed=True)

    def send(self, group: Group, place: int, to: int, tag: int, part: Contribution) -> None:
        """Record the message and its arrival."""
        with self._off_the_clock() as rank:
            self._turn(rank)
            event = self.notes.note(group, place, part, self.clock.now(rank))
            self._messages[id(part)] = part, self.links.message(event)
            group.hand(place, to, tag, part)

    def receive(self, group: Group, place: int, source: int | None, tag: int, part: Contribution) -> Receive:
        """Record the call."""
        with self._off_the_clock() as rank:
            self._turn(rank)
            call = _Call()
            call.events[group.ranks[place]] = self.notes.note(group, place, part, self.clock.now(rank))
            receive = group.take(place, source, tag, part)
            self._of[receive] = call
            return receive

    # -- what it waits for

    def wait(self, waits_for: Waitable, seconds: float) -> None:
        """Wait until the call is complete, and until its end."""
        with self._off_the_clock() as rank:
            before = self.clock.now(rank)
            if not waits_for.done:
                if self._schedule is not None and rank is not None:
                    self._schedule.block(rank, waits_for)
                else:
                    waits_for.sleep(seconds)
            end = self._end(waits_for)
            if end is not None:
                self.clock.until(rank, end, self._world.check)
            event = None if rank is None else self._call(waits_for).events.get(rank)
            if event is not None:
                event.stood = before if event.stood is None else event.stood
                event.waited += self.clock.now(rank) - before

    def over(self, waits_for: Waitable) -> bool:
        """Whether the call is complete and its modelled end has passed."""
        with self._off_the_clock() as rank:
            self._turn(rank)
            end = self._end(waits_for) if waits_for.done else None
            over = waits_for.done and (end is None or self.clock.now(rank) >= end)
            if not over:
                self.clock.poll(rank)
            return over

    def _call(self, waits_for: Waitable) -> _Call:
        return self._of.setdefault(waits_for, _Call())

    def _end(self, waits_for: Waitable) -> float | None:
        """The end of a complete call; None: it failed."""
        call = self._call(waits_for)
        if call.end is None and isinstance(waits_for, Receive) and waits_for.sent is not None:
            _, came = self._messages.pop(id(waits_for.sent))
            (event,) = call.events.values()
            event.start, event.end = event.called, max(event.called, came)
            call.end = event.end
        return call.end


def run_single_rank(
    size: int,
    rank: int,
    prepare: Callable[[], object],
    watch: Callable[[World], None],
    fn: Callable[[], T],
    timeout: float | None,
) -> T:
    """Run a function as one rank of a world, in a separate thread, which is abandoned after the timeout."""
    threads.register()
    results: list[T] = []
    errors: list[BaseException] = []

    def be() -> None:
        world = World(size)
        try:
            with threads.seated(world, rank, RankState()), _torch.thread_isolation():
                store = dist.HashStore()  # type: ignore[attr-defined]
                dist.init_process_group("threads", store=store, rank=rank, world_size=size)
                prepare()
                watch(world)
                try:
                    results.append(fn())
                finally:
                    world.observer = None
                    dist.destroy_process_group()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=be, name=f"gradmesh rank {rank}", daemon=True)
    thread.start()
    thread.join(timeout)
    if thread.is_alive():
        text = message(
            f"rank {rank}, simulated alone in a world of {size}, did not return within {timeout:g} s",
            op="simulate",
            remedy="remove loops that wait for other ranks, or pass a longer timeout, e.g. timeout=600",
        )
        raise RankError(text, rank=rank)
    if errors:
        text = message(
            f"rank {rank}, simulated alone in a world of {size}, failed with {type(errors[0]).__name__}",
            op="simulate",
            got=str(errors[0]),
        )
        raise RankError(text, rank=rank) from errors[0]
    return results[0]


class SingleRankObserver(Watching):
    """Observes a world in which only one rank runs."""

    def _bring(
        self,
        group: Group,
        place: int,
        part: Contribution,
        kernel: Callable[[list[Contribution]], None],  # noqa: ARG002 - needs every rank's part
        carried: Callable[[], None],
    ) -> Rendezvous:
        meeting = Rendezvous(group, group.calls[place])
        group.calls[place] += 1
        _torch.in_plain_mode(lambda: _make_up(place, part, len(group.ranks)))
        carried()
        meeting.done = True
        return meeting

    def send(self, group: Group, place: int, to: int, tag: int, part: Contribution) -> None:  # noqa: ARG002
        """Raise: there is no receiver."""
        raise _no_peer(group, part)

    def receive(self, group: Group, place: int, source: int | None, tag: int, part: Contribution) -> Receive:  # noqa: ARG002
        """Raise: there is no sender."""
        raise _no_peer(group, part)


def _no_peer(group: Group, part: Contribution) -> ArgumentError:
    return ArgumentError.of(
        "point-to-point messages are not supported with only=",
        op="simulate",
        axis=str(group),
        expected="collectives, since only one rank runs",
        got=str(part),
        remedy="remove only= to simulate every rank, or use the collectives gradmesh.permute and gradmesh.shift",
    )


def _make_up(place: int, part: Contribution, size: int) -> None:
    """Write the result that the call would have if every rank had this rank's input."""
    op, pieces = op_of(part), part.pieces
    if op == "reduce_scatter":
        given = [batch.give[place] for batch in pieces]  # type: ignore[attr-defined]
        _fill(part.outputs, [_summed(part.call, tensor, size) for tensor in given])
    elif op == "all_reduce" or (op == "reduce" and part.call.endswith(f"root {place})")):
        _fill(part.outputs, [_summed(part.call, tensor, size) for tensor in part.inputs])
    elif op == "permute" and pieces is not None:
        _fill(part.outputs, part.inputs)
    elif isinstance(pieces, Sequence):
        for batch in pieces:
            for source, taken in enumerate(batch.take):
                if taken is not None:
                    _fill([taken], [batch.give[source], *batch.give, *part.inputs])


def _fill(outputs: Sequence[torch.Tensor], values: Sequence[torch.Tensor | None]) -> None:
    """Write into each output the value of the same index, or the first one of its shape and dtype; else zeros."""
    for number, output in enumerate(outputs):
        wanted = [*values[number : number + 1], *values]
        fits = (v for v in wanted if v is not None and v.shape == output.shape and v.dtype == output.dtype)
        write(output, next(fits, torch.zeros_like(output)))


def _summed(call: str, tensor: torch.Tensor, size: int) -> torch.Tensor:
    """The reduction of the same tensor on `size` ranks."""
    if "(sum" in call:
        return tensor * size
    if "(product" in call:
        return tensor**size
    if "(bxor" in call and size % 2 == 0:
        return tensor ^ tensor
    return tensor


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
            watching.append(Watching(world, Clock(), links, axes, None))
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
    raise ArgumentError.of(problem, op="simulate", expected=expected, got=got, remedy=remedy)
