"""The observer of a simulation: records every call, schedules the ranks, and delays results.

A call is recorded when a rank makes it, and gets its times when the last rank has made it. With a schedule, a rank
yields at each call. With a cost model, a rank that waits for a call continues at the call's modelled end.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from weakref import WeakKeyDictionary

from gradmesh.backends.threads.observing import Observer
from gradmesh.backends.threads.rendezvous import Contribution, Group, Receive, Rendezvous
from gradmesh.backends.threads.waiting import Waitable, World
from gradmesh.verify.simulator.clocks import Clock, WallClock
from gradmesh.verify.simulator.events import Event
from gradmesh.verify.simulator.links import Links
from gradmesh.verify.simulator.notes import Notes
from gradmesh.verify.simulator.schedule import Schedule

__all__ = ["Watching"]

Kernel = Callable[[list[Contribution]], None]


class _Call:
    """A call: the event of each rank that has made it, and its end."""

    __slots__ = ("end", "events")

    def __init__(self) -> None:
        self.events: dict[int, Event] = {}
        self.end: float | None = None


class Watching(Observer):
    """Observes a world.

    Args:
        world: the ranks.
        clock: the clocks of the ranks.
        links: the modelled links.
        mesh: the sizes of the axes by name, the slowest first.
        schedule: the scheduler; None: all ranks run concurrently.

    Attributes:
        seconds: when the last rank's function returned.
    """

    def __init__(
        self, world: World, clock: Clock, links: Links, mesh: Mapping[str, int], schedule: Schedule | None
    ) -> None:
        self.clock, self.links, self.notes = clock, links, Notes(mesh)
        self.seconds = 0.0
        self._world, self._schedule = world, schedule
        self._calls: dict[tuple[Group, int], _Call] = {}
        self._of: WeakKeyDictionary[Waitable, _Call] = WeakKeyDictionary()
        self._messages: dict[int, tuple[Contribution, float]] = {}
        self._free: dict[tuple[Group, int], float] = {}

    @property
    def lives(self) -> bool:
        """Whether modelled times elapse in wall-clock time."""
        return self.links.model is not None and isinstance(self.clock, WallClock)

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

        return group.bring(place, part, work)

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
