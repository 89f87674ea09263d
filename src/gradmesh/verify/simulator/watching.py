"""The observer of a simulation: it notes every call, orders the ranks, and holds results back.

Each call of a rank is noted when it is made, and gets its times when the last rank has made it. Where there is a
schedule, a rank gives its turn away at each call. Where there is a cost model, a rank that waits for a call goes on at
the call's end by the clock, and not before.
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
from gradmesh.verify.simulator.notes import Notes
from gradmesh.verify.simulator.schedule import Schedule
from gradmesh.verify.simulator.wire import Wire

__all__ = ["Watching"]

Kernel = Callable[[list[Contribution]], None]


class _Call:
    """What is known of a call: the event of each rank that has made it, and when it ends."""

    __slots__ = ("end", "events")

    def __init__(self) -> None:
        self.events: dict[int, Event] = {}
        self.end: float | None = None


class Watching(Observer):
    """Watches a world.

    Args:
        world: the ranks.
        clock: what time it is on a rank.
        wire: when a call ends.
        mesh: the sizes of the axes by name, the slowest first.
        schedule: who has the turn; None: everybody runs.

    Attributes:
        seconds: when the last rank's function was over.
    """

    def __init__(
        self, world: World, clock: Clock, wire: Wire, mesh: Mapping[str, int], schedule: Schedule | None
    ) -> None:
        self.clock, self.wire, self.notes = clock, wire, Notes(mesh)
        self.seconds = 0.0
        self._world, self._schedule = world, schedule
        self._calls: dict[tuple[Group, int], _Call] = {}
        self._of: WeakKeyDictionary[Waitable, _Call] = WeakKeyDictionary()
        self._messages: dict[int, tuple[Contribution, float]] = {}
        self._free: dict[tuple[Group, int], float] = {}

    @property
    def lives(self) -> bool:
        """Whether a cost model is lived in the machine's time."""
        return self.wire.model is not None and isinstance(self.clock, WallClock)

    @property
    def takes_turns(self) -> bool:
        """Whether each rank has its own clock."""
        return self.clock.of_ranks

    def async_axis(self, group: Group, run: Callable[[], None]) -> Callable[[], None]:
        """Run it now, and set the rank's clock back; what was begun before on the group comes first."""
        with self._off_the_clock() as rank:
            if rank is None:
                run()
                return lambda: None
            key, begun = (group, rank), self.clock.now(rank)
            self.clock.put(rank, max(begun, self._free.get(key, 0.0)))
            self.clock.go_on(rank)
            run()
            self.clock.pause(rank)
            end = self._free[key] = self.clock.now(rank)
            self.clock.put(rank, begun)

        def wait() -> None:
            with self._off_the_clock():
                self.clock.until(rank, end, self._world.check)

        return wait

    # -- a rank's function

    @contextlib.contextmanager
    def taking_part(self, rank: int) -> Iterator[None]:
        """Run a rank's function, from the first turn to the last."""
        failed: BaseException | None = None
        try:
            if self._schedule is not None:
                self._schedule.enter(rank)
            self.clock.go_on(rank)
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
        """What the simulator does is not the rank's work."""
        if self._schedule is None:
            rank = self._world.rank_of_thread.get(threading.get_ident())
        else:
            rank = self._schedule.rank_here()
        if rank is None:
            yield None
            return
        self.clock.pause(rank)
        try:
            yield rank
        finally:
            self.clock.go_on(rank)

    def _turn(self, rank: int | None) -> None:
        if self._schedule is not None and rank is not None:
            self._schedule.turn(rank)

    # -- what a rank calls

    def meet(self, group: Group, place: int, part: Contribution, kernel: Kernel) -> Rendezvous:
        """Note the call, and have its end entered when all ranks have made it."""
        with self._off_the_clock() as rank:
            self._turn(rank)
            key = group, group.calls[place]
            call = self._calls.setdefault(key, _Call())
            call.events[group.ranks[place]] = self.notes.note(group, place, part, self.clock.now(rank))

            def carried() -> None:
                del self._calls[key]
                call.end = self.wire.carry(list(call.events.values()), self.clock.now(None))

            meeting = self._bring(group, place, part, kernel, carried)
            self._of[meeting] = call
            return meeting

    def _bring(
        self, group: Group, place: int, part: Contribution, kernel: Kernel, carried: Callable[[], None]
    ) -> Rendezvous:
        """Make the call; `carried` is to be called when all ranks have made it, before any of them goes on."""

        def work(parts: list[Contribution]) -> None:
            kernel(parts)
            carried()

        return group.bring(place, part, work)

    def send(self, group: Group, place: int, to: int, tag: int, part: Contribution) -> None:
        """Note the message, and when it is there."""
        with self._off_the_clock() as rank:
            self._turn(rank)
            event = self.notes.note(group, place, part, self.clock.now(rank))
            self._messages[id(part)] = part, self.wire.send(event)
            group.hand(place, to, tag, part)

    def receive(self, group: Group, place: int, source: int | None, tag: int, part: Contribution) -> Receive:
        """Note the call."""
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
        """Whether the call is complete, and its end has passed."""
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
        """When a complete call ends; None: it failed."""
        call = self._call(waits_for)
        if call.end is None and isinstance(waits_for, Receive) and waits_for.sent is not None:
            _, came = self._messages.pop(id(waits_for.sent))
            (event,) = call.events.values()
            event.start, event.end = event.called, max(event.called, came)
            call.end = event.end
        return call.end
