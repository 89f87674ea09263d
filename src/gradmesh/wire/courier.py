"""The thread that makes the calls that were begun, so that their rank can do something else.

The calls that are begun on an axis travel on a process group of their own, with the same ranks: what they are paired
with on other ranks depends on nothing but the order in which they were begun, and not on what the rank calls meanwhile
(DDP's buckets, say). A thread, the courier, makes them one after another. It sleeps in a queue where nothing is begun.

What is called on an `Aside` and not begun waits until the courier is through with what was.
"""

from __future__ import annotations

import atexit
import os
import queue
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

from gradmesh import _torch
from gradmesh.axis import Axis
from gradmesh.backends import threads
from gradmesh.backends.threads.group import ThreadsGroup
from gradmesh.backends.threads.waiting import Errand, Runner
from gradmesh.call_sites import Site, call_site, seen_from
from gradmesh.errors import OrderError, message

__all__ = ["Aside", "Courier", "Job", "aside", "in_turn"]

T = TypeVar("T")


class Job(Generic[T]):
    """One call that a courier makes.

    Args:
        work: makes it, and returns its result.

    Attributes:
        over: whether it has been made, well or badly.
    """

    __slots__ = ("_after", "_by", "_errand", "_error", "_gate", "_result", "_site", "_until", "_work", "over")

    def __init__(self, work: Callable[[], T]) -> None:
        self._work: Callable[[], T] | None = work
        self._site: Site = call_site()
        self._result: T
        self._error: BaseException | None = None
        self._errand: Errand | None = None
        self._by: threading.Thread | None = None
        self._gate = (
            threading.Lock()
        )  # a launcher that looks for ranks which wait sees this file, and no Event's
        self._gate.acquire()
        self.over = False
        self._until: Callable[[], None] | None = None
        self._after: list[Callable[[Job[T]], None]] = []

    def run(self) -> None:
        """Make the call, on the courier's thread."""
        if self._errand is None:
            self._make()
        else:
            self._errand.run(self._make)
        with _after_lock:
            self.over = True
            self._gate.release()
            after, self._after = self._after, []
        for then in after:
            then(self)

    def _make(self) -> None:
        work, self._work = self._work, None
        if work is None:
            return
        try:
            with seen_from(self._site):
                self._result = work()
        except BaseException as error:
            self._error = error

    def wait(self) -> T:
        """The result, when it is there; what went wrong with the call is raised here."""
        if self._by is threading.current_thread() and not self.over:
            raise OrderError(
                message(
                    "a call is waited for on the thread that is to make it",
                    op="async_op",
                    expected="wait() on a thread of the program",
                    got="wait() in what future().then(...) runs",
                    remedy="wait for the calls first, or use torch.futures.collect_all",
                )
            )
        if self._until is not None:
            self._until()
        elif self._errand is not None:
            self._errand.wait(float("inf"))
        with self._gate:
            pass
        if self._error is not None:
            raise self._error
        return self._result

    def then(self, call: Callable[[Job[T]], None]) -> None:
        """Have a function called when it is over, on the courier's thread; at once if it is."""
        with _after_lock:
            if not self.over:
                self._after.append(call)
                return
        call(self)


_after_lock = threading.Lock()


class Courier:
    """Makes the calls of a group, in the order in which they were begun, on a thread of its own.

    Args:
        group: the group, for CPU tensors.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._shared = group.shared if isinstance(group, ThreadsGroup) else None
        self._jobs: queue.SimpleQueue[Job[Any] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        self._runner = Runner()

    def begin(self, job: Job[Any]) -> None:
        """Have a call made when those before it have been."""
        shared = self._shared
        if shared is not None:
            observer = shared.world.observer
            if observer is not None and observer.takes_turns:
                job._until = observer.aside(shared, job.run)
                return
            job._errand = Errand(shared.world, self._runner)
        if self._process != os.getpid():  # no thread comes along into a forked process
            job.run()
            return
        if self._thread is None:
            self._thread = self._started()
        job._by = self._thread
        self._jobs.put(job)

    @property
    def here(self) -> bool:
        """Whether the calling thread is the courier's."""
        return self._thread is None or threading.get_ident() == self._thread.ident

    def finish(self) -> None:
        """Wait until what was begun has been made. Its caller makes the call behind it, in whose modes it belongs."""
        before: Job[None] = Job(lambda: None)
        self.begin(before)
        before.wait()

    def _started(self) -> threading.Thread:
        take_place = threads.stand_in() if self._shared is not None else None
        arguments = self._jobs, torch.get_num_threads(), take_place
        thread = threading.Thread(target=_serve, args=arguments, name="gradmesh courier", daemon=True)
        thread.start()
        # A thread that calls into torch while the interpreter goes down would take the process with it.
        ending = weakref.finalize(self, self._jobs.put, None)
        ending.atexit = False
        atexit.register(_end, weakref.ref(self), thread)
        return thread


def _serve(
    jobs: queue.SimpleQueue[Job[Any] | None], cores: int, take_place: Callable[[], None] | None
) -> None:
    if take_place is not None:
        take_place()
    torch.set_num_threads(cores)
    torch.set_grad_enabled(False)
    while (job := jobs.get()) is not None:
        job.run()
        del job


def _end(courier: weakref.ref[Courier], thread: threading.Thread) -> None:
    alive = courier()
    if alive is not None:
        alive._jobs.put(None)
    thread.join(1)


@dataclass(frozen=True, slots=True)
class Aside(Axis):
    """An axis as the calls see it that were begun on it: with a group and a courier of its own."""

    courier: Courier


def in_turn(axis: Axis, work: Callable[[], T]) -> T:
    """Do what calls on an axis: on an `Aside` behind what was begun there, else at once."""
    if type(axis) is Aside and not axis.courier.here:
        axis.courier.finish()
    return work()


_asides: weakref.WeakKeyDictionary[dist.ProcessGroup, Aside] = weakref.WeakKeyDictionary()


def aside(axis: Axis) -> Aside:
    """The same axis for calls that are begun. At the first call all its ranks make a group.

    Args:
        axis: an axis of several ranks.
    """
    if isinstance(axis, Aside):
        return axis
    found = _asides.get(axis.group)
    if found is None:
        group = _torch.twin(axis.group, "begun")
        found = _asides[axis.group] = Aside(axis.name, axis.rank, axis.size, group, Courier(group))
    if found.name != axis.name:
        return Aside(axis.name, found.rank, found.size, found.group, found.courier)
    return found
