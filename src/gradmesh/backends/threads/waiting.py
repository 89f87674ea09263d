"""Waiting with deadlock detection: a world of threads tracks which ranks run and which wait.

A rank waits for one thing at a time. If no rank runs and nothing can complete, that is a deadlock, and every waiting
rank raises an error that lists all pending calls.
"""

from __future__ import annotations

import functools
import itertools
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from gradmesh.backends.messages import RETURNED_REMEDY, SAME_CALLS, timed_out_text
from gradmesh.backends.threads.observing import Observer
from gradmesh.errors import AbortedError, DeadlockError, GradmeshError, message

__all__ = ["BackgroundTask", "BackgroundThread", "Waitable", "World"]

GRACE = 0.25
"""Seconds between two checks; two consecutive checks without progress in between report a deadlock."""

_SHOWN_ONE_BY_ONE = 32


class World:
    """The ranks of one launch: which of them run, wait, or have ended."""

    def __init__(self, size: int) -> None:
        self.size = size
        # Ranks start with different seeds, as processes do, derived from the launching thread's generator.
        self.seed = int(torch.randint(2**62, ()))
        self.lock = threading.Lock()
        self.waiting: dict[int, Waitable] = {}  # by rank, for the ranks' own threads
        self.ended: dict[int, str] = {}  # how a rank ended
        self.gates: set[threading.Lock] = set()
        self.stopped: Callable[[], GradmeshError] | None = None
        self.events = 0
        self.shared: dict[object, Any] = {}  # objects that ranks share, such as groups
        self.rank_of_thread: dict[int, int] = {}
        self.task_of_thread: dict[int, BackgroundTask] = {}
        self.observer: Observer | None = None

    def begin(self) -> None:
        """Mark every rank as running."""
        with self.lock:
            self.ended.clear()
            self.events += 1

    def leave(self, rank: int, error: BaseException | None = None) -> None:
        """Mark a rank's function as ended; an error aborts all waits immediately."""
        with self.lock:
            self.ended[rank] = "returned" if error is None else f"failed with {type(error).__name__}"
            self.events += 1
        if error is not None:
            text = f"rank {rank} failed with {type(error).__name__}: {error}"
            self.stop(lambda: AbortedError(message(text, remedy="fix the error of that rank"), rank=rank))

    def stop(self, error: Callable[[], GradmeshError]) -> None:
        """Abort all waits, current and future, with this error; only the first call counts."""
        with self.lock:
            self.stop_now(error)

    def stop_now(self, error: Callable[[], GradmeshError]) -> None:
        """As `stop`, for a caller that holds the lock."""
        if self.stopped is None:
            self.stopped = error
            for gate in self.gates:
                gate.release()
            self.gates.clear()

    def check(self) -> None:
        """Raise when the world has been stopped."""
        if self.stopped is not None:
            raise self.stopped()

    def runs(self, rank: int) -> bool:
        """Whether a rank is in its function and does not wait for an incomplete call."""
        if rank in self.ended:
            return False
        waits_for = self.waiting.get(rank)
        return waits_for is None or waits_for.done or waits_for.moves

    def hopeless(self, waits_for: Waitable) -> bool:
        """Whether it can no longer complete: a rank that it needs has ended, or no rank runs."""
        return bool(self.lost(waits_for)) or not any(map(self.runs, range(self.size)))

    def lost(self, waits_for: Waitable) -> list[int]:
        """The ended ranks that it needs."""
        return sorted(self.ended.keys() & set(waits_for.needs()))

    def deadlock(self, problem: str) -> DeadlockError:
        """Create the error that lists the state of every rank. The caller holds the lock."""
        lines = _folded([self._doing(rank) for rank in range(self.size)])
        return DeadlockError(
            message(
                problem,
                got="\n".join(lines),
                remedy=RETURNED_REMEDY if self.ended else f"make sure that {SAME_CALLS}",
            )
        )

    def _doing(self, rank: int) -> str:
        if rank in self.ended:
            return f"has {self.ended[rank]}"
        return "runs" if self.runs(rank) else f"waits in {self.waiting[rank].show(rank)}"


def _folded(doing: list[str]) -> list[str]:
    """A line for each rank; if there are many, one line for consecutive ranks in the same state.

    >>> _folded(["runs"] * 2)
    ['rank 0  runs', 'rank 1  runs']
    >>> _folded(["runs"] * 39 + ["has returned"])
    ['ranks 0 to 38  each runs', 'rank 39  has returned']
    """
    if len(doing) <= _SHOWN_ONE_BY_ONE:
        return [f"rank {rank}  {what}" for rank, what in enumerate(doing)]
    lines, first = [], 0
    for what, alike in itertools.groupby(doing):
        last = first + len(list(alike)) - 1
        lines.append(f"rank {first}  {what}" if first == last else f"ranks {first} to {last}  each {what}")
        first = last + 1
    return lines


class Waitable:
    """Something that a rank waits for; complete when `done`."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.done = False
        self.error: BaseException | None = None
        self.gates: list[threading.Lock] = []

    def needs(self) -> Iterable[int]:
        """The ranks, in the world, without which it cannot complete."""
        raise NotImplementedError

    def show(self, rank: int) -> str:
        """The call of a rank, with its group and line."""
        raise NotImplementedError

    def withdraw(self) -> bool:
        """Whether it can be aborted, because no thread works on it. The caller holds the lock."""
        raise NotImplementedError

    def hopeless(self) -> str:
        """Why it can no longer complete, for the error."""
        lost = self.world.lost(self)
        if not lost:
            return "deadlock: every rank waits for another one"
        names = f"rank{'s' * (len(lost) > 1)} {', '.join(map(str, lost))}"
        return f"{names} ha{'ve' if len(lost) > 1 else 's'} {self.world.ended[lost[0]]}, and the others wait for it"

    def _complete(self, error: BaseException | None = None) -> None:
        """Wake all waiters. The caller holds the lock."""
        self.error = error
        self.done = True
        self.world.events += 1
        for gate in self.gates:
            if gate in self.world.gates:
                self.world.gates.remove(gate)
                gate.release()
        self.gates.clear()

    def wait(self, seconds: float) -> None:
        """Wait until it is complete.

        Raises:
            DeadlockError: it can no longer complete, or did not complete within `seconds`.
            AbortedError: another rank failed.
        """
        observer = self.world.observer
        if observer is not None:
            observer.wait(self, seconds)
        elif not self.done:
            self.sleep(seconds)
        if self.error is not None:
            raise _fresh(self.error)

    @property
    def moves(self) -> bool:
        """Whether a background thread is about to complete it."""
        return False

    def over(self) -> bool:
        """Whether it is complete from the calling rank's view (the observer may delay it)."""
        observer = self.world.observer
        return self.done if observer is None else observer.over(self)

    def sleep(self, seconds: float) -> None:
        """Wait until it has completed or failed, or the world has been stopped.

        Raises:
            GradmeshError: the world has been stopped.
        """
        world = self.world
        thread = threading.get_ident()
        rank = world.rank_of_thread.get(thread)  # None in a thread that a rank started
        task = world.task_of_thread.get(thread)
        deadline = time.monotonic() + seconds
        gate = threading.Lock()
        gate.acquire()
        with world.lock:
            if self.done:
                return
            world.check()
            self.gates.append(gate)
            world.gates.add(gate)
            if rank is not None:
                world.waiting[rank] = self
                world.events += 1
            if task is not None:
                task.runner.waits_for = self
                world.events += 1
        hopeless_since = -1  # the event count at the last check, if that was hopeless
        try:
            while not gate.acquire(timeout=max(0.001, min(GRACE, deadline - time.monotonic()))):
                with world.lock:
                    if self.done or world.stopped is not None:
                        break
                    if time.monotonic() >= deadline and self.withdraw():
                        self._complete(world.deadlock(timed_out_text(self.needs(), seconds)))
                    elif not world.hopeless(self):
                        hopeless_since = -1
                    elif hopeless_since == world.events or (hopeless_since >= 0 and world.lost(self)):
                        error = world.deadlock(self.hopeless())
                        world.stop_now(functools.partial(DeadlockError, str(error)))
                    else:
                        hopeless_since = world.events
        finally:
            with world.lock:
                world.gates.discard(gate)
                if rank is not None:
                    world.waiting.pop(rank, None)
                if task is not None:
                    task.runner.waits_for = None
        if not self.done:
            world.check()


class BackgroundThread:
    """A thread that runs tasks for a rank, one after another.

    Attributes:
        waits_for: what it currently waits for.
    """

    def __init__(self) -> None:
        self.waits_for: Waitable | None = None


class BackgroundTask(Waitable):
    """A task of a background thread, which a rank may wait for; deadlock detection looks through it.

    Args:
        world: the ranks.
        runner: the thread; earlier tasks block this one.
    """

    def __init__(self, world: World, runner: BackgroundThread) -> None:
        super().__init__(world)
        self.runner = runner

    @property
    def moves(self) -> bool:
        """Whether the thread runs."""
        waits_for = self.runner.waits_for
        return waits_for is None or waits_for.done

    def needs(self) -> Iterable[int]:
        """The ranks that the thread waits for."""
        waits_for = self.runner.waits_for
        return [] if waits_for is None else waits_for.needs()

    def show(self, rank: int) -> str:
        """The call of the thread, with its group and line."""
        waits_for = self.runner.waits_for
        return "an asynchronous call" if waits_for is None else waits_for.show(rank)

    def withdraw(self) -> bool:
        """Never: the call itself has a time limit."""
        return False

    def run(self, work: Callable[[], None]) -> None:
        """Run the task in the background thread."""
        thread = threading.get_ident()
        self.world.task_of_thread[thread] = self
        try:
            work()
        finally:
            del self.world.task_of_thread[thread]
            with self.world.lock:
                self._complete()


def _fresh(error: BaseException) -> BaseException:
    """A separate exception for every rank, since threads must not share a traceback."""
    if isinstance(error, GradmeshError):
        return type(error)(str(error))
    new = RuntimeError(str(error))
    new.__cause__ = error
    return new
