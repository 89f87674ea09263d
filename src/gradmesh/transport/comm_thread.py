"""The communication thread, which runs async collectives while their rank computes.

Async calls on an axis use a process group of their own with the same ranks: they are paired with other ranks' calls by
the order in which they were started, whatever the rank calls meanwhile (DDP's buckets, say). The thread runs them one
after another and sleeps on a queue while there are none.

A synchronous call on an `AsyncAxis` first waits for the pending async calls.

Async calls of device tensors run on a communication stream instead, while the current stream computes. The thread that
starts a call launches it: the stream waits for the current stream, and the call's kernels and the group's collective
are queued behind that. `wait()` makes the current stream wait; the host never does. The calls use the axis's own
process group, so its communicator runs them in the order in which they were started, between its other calls. That
order has to be the same on every rank, as that of all calls. The operand is kept until `wait()`: its memory must not be
reused before the call has read it.
"""

from __future__ import annotations

import atexit
import os
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from gradmesh import _torch
from gradmesh._util.call_sites import Site, call_site, seen_from
from gradmesh.backends import threads
from gradmesh.errors import NotInitializedError, OrderError, message, refused_wait
from gradmesh.runtime.mesh import Axis
from gradmesh.runtime.state import INSTALLED, instruments, rank_state

if TYPE_CHECKING:
    from gradmesh.backends.threads.rendezvous import BackgroundTask, Group

T = TypeVar("T")


class WorkItem(Generic[T]):
    """One call that the communication thread runs; `work` makes it and returns its result."""

    __slots__ = (
        "_after",
        "_completed_on",
        "_error",
        "_gate",
        "_result",
        "_site",
        "_task",
        "_wait_for",
        "_work",
        "_worker",
        "over",
        "started",
    )

    def __init__(self, work: Callable[[], T]) -> None:
        self.started = time.perf_counter()  # when it was started
        self._work: Callable[[], T] | None = work
        self._site: Site = call_site()
        self._result: T
        self._error: BaseException | None = None
        self._task: BackgroundTask | None = None
        self._worker: threading.Thread | None = None
        self._completed_on: int | None = None  # the thread that runs the callbacks of `then`
        # Not an Event: the launcher's hang detector looks for this file in the stacks of waiting ranks.
        self._gate = threading.Lock()
        self._gate.acquire()
        self.over = False  # whether it has returned or raised, and the callbacks of `then` have returned
        self._wait_for: Callable[[], None] | None = None
        self._after: list[Callable[[WorkItem[T]], None]] = []

    def run(self) -> None:
        """Make the call, on the communication thread."""
        if self._task is None:
            self._execute()
        else:
            self._task.run(self._execute)
        self._completed_on = threading.get_ident()
        while True:
            with _after_lock:
                after, self._after = self._after, []
                if not after:
                    self.over = True
                    self._gate.release()
                    return
            _current.completing = True
            try:
                for then in after:
                    then(self)
            finally:
                _current.completing = False

    @property
    def _made_here(self) -> bool:
        """Whether the caller is a callback of `then`, which gets the result first."""
        return not self.over and self._completed_on == threading.get_ident()

    def _execute(self) -> None:
        work, self._work = self._work, None
        if work is None:
            return
        _current.job = self
        try:
            with seen_from(self._site):
                self._result = work()
        except BaseException as error:
            self._error = error
        finally:
            _current.job = None

    def wait(self) -> T:
        """Wait for the result; raises the error of the call."""
        if self._made_here:
            return self._outcome()
        if self._worker is threading.current_thread() and not self.over:
            raise refused_wait(
                message(
                    "wait() in a future().then(...) callback would deadlock: callbacks run on the communication thread",
                    op="async_op",
                    expected="wait() on a thread of the program",
                    got="wait() inside future().then(callback), for a call that is still pending",
                    remedy="call wait() before then(...), or torch.futures.collect_all([a.future(), b.future()])",
                )
            )
        if not INSTALLED[0]:
            return self._wait()
        started = time.perf_counter()
        try:
            return self._wait()
        finally:
            for each in instruments():
                each.waited(self, started, time.perf_counter())

    def _wait(self) -> T:
        if self._wait_for is not None:
            self._wait_for()
        elif self._task is not None:
            self._task.wait(float("inf"))
        with self._gate:
            pass
        return self._outcome()

    def _outcome(self) -> T:
        if self._error is not None:
            raise self._error
        return self._result

    def then(self, call: Callable[[WorkItem[T]], None]) -> None:
        """Register a callback for completion, on the communication thread; runs it now if the call is over.

        `wait` returns after the callbacks, so a future that a callback completes is done by then.
        """
        with _after_lock:
            if not self.over and not self._made_here:
                self._after.append(call)
                return
        call(self)


_after_lock = threading.Lock()
# .job: the item that the thread runs; .completing: whether it runs callbacks of `then`
_current = threading.local()


def current_job() -> WorkItem[Any] | None:
    """The item that the calling thread runs."""
    return getattr(_current, "job", None)


def in_then_callback() -> bool:
    """Whether the caller is a callback of `then`, on the communication thread."""
    return getattr(_current, "completing", False)


class CommThread:
    """A thread that runs the async calls of an axis, in the order in which they were started."""

    def __init__(self, axis: Axis) -> None:
        self._name, self._rank, self._size = axis.name, axis.rank, axis.size
        self._of = weakref.ref(axis.group)  # which keeps this communication thread
        self._own: Axis | None = None
        # what the ranks of a group of the threads backend share
        self._shared: Group | None = getattr(axis.group, "shared", None)
        if self._shared is not None:
            from gradmesh.backends.threads.rendezvous import BackgroundThread

            self._runner = BackgroundThread()
        self._jobs: queue.SimpleQueue[WorkItem[Any] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._process = os.getpid()

    @property
    def axis(self) -> Axis:
        """The axis with the group for async calls, which its ranks create at the first call."""
        if self._own is None:
            group = self._of()
            if group is None:
                raise NotInitializedError.of(
                    "the process group was destroyed while async collectives were pending",
                    op="async_op",
                    expected="a process group that exists until wait() has returned",
                    got=f"no group for axis {self._name!r}",
                    remedy="call wait() on each pending collective before destroy_process_group()",
                )
            self._own = Axis(self._name, self._rank, self._size, _torch.duplicate_group(group, "async"))
            rank_state().get_or_create(_DuplicateGroups).add(group, self._own.group)
        return self._own

    def submit(self, job: WorkItem[Any]) -> None:
        """Queue a call."""
        shared = self._shared
        if shared is not None:
            observer = shared.world.observer
            if observer is not None and observer.takes_turns:
                job._wait_for = observer.async_axis(shared, job.run)
                return
            from gradmesh.backends.threads.rendezvous import BackgroundTask

            job._task = BackgroundTask(shared.world, self._runner)
        if self._process != os.getpid():  # threads do not survive a fork
            job.run()
            return
        with _starting:  # a program may start calls in several threads
            if self._thread is None:
                self._thread = self._start_thread()
        job._worker = self._thread
        self._jobs.put(job)

    @property
    def here(self) -> bool:
        """Whether the caller is the communication thread."""
        return self._thread is None or threading.get_ident() == self._thread.ident

    def drain(self) -> None:
        """Wait until the queue is empty. The caller then makes its call itself, under its own dispatch modes."""
        before: WorkItem[None] = WorkItem(lambda: None)
        self.submit(before)
        before.wait()

    def _start_thread(self) -> threading.Thread:
        take_place = threads.stand_in() if self._shared is not None else None
        arguments = self._jobs, torch.get_num_threads(), take_place
        thread = threading.Thread(target=_serve, args=arguments, name="gradmesh communication", daemon=True)
        thread.start()
        # A thread that calls into torch during interpreter shutdown would crash the process.
        ending = weakref.finalize(self, self._jobs.put, None)
        ending.atexit = False
        _alive.add(self)
        return thread


def _serve(
    jobs: queue.SimpleQueue[WorkItem[Any] | None], cores: int, take_place: Callable[[], None] | None
) -> None:
    if take_place is not None:
        take_place()
    torch.set_num_threads(cores)
    torch.set_grad_enabled(False)
    while (job := jobs.get()) is not None:
        job.run()
        del job


_starting = threading.Lock()
_alive: weakref.WeakSet[CommThread] = weakref.WeakSet()


@atexit.register
def _end() -> None:
    """Stop the communication threads, and report calls that were never waited for."""
    comm_threads = list(_alive)
    for comm_thread in comm_threads:
        comm_thread._jobs.put(None)
    for comm_thread in comm_threads:
        if comm_thread._thread is not None:
            comm_thread._thread.join(1)
    try:
        rank_state().started.check(at_the_end=True)
    except OrderError as error:
        print(error, file=sys.stderr)


@dataclass
class _DuplicateGroups:
    """The groups for async calls of a rank, each with the group that it duplicates.

    torch keeps every group that is not destroyed, so `add` destroys duplicates of groups that no longer exist.
    """

    made: list[tuple[weakref.ref[dist.ProcessGroup], dist.ProcessGroup]] = field(default_factory=list)

    def add(self, group: dist.ProcessGroup, duplicate_group: dist.ProcessGroup) -> None:
        """Add a duplicate, and destroy those whose group no longer exists."""
        over = [pair for pair in self.made if not _torch.is_known(pair[0]())]
        self.made = [pair for pair in self.made if pair not in over]
        self.made.append((weakref.ref(group), duplicate_group))
        for _, left in over:
            if _torch.is_known(left):
                dist.destroy_process_group(left)


@dataclass(frozen=True, slots=True)
class AsyncAxis(Axis):
    """An axis for async calls."""

    comm_thread: CommThread  # the thread that runs them, on a group of their own


def transport_axis(axis: Axis) -> Axis:
    """The axis with the process group that calls on `axis` use."""
    return axis.comm_thread.axis if type(axis) is AsyncAxis else axis


def after_pending(axis: Axis, work: Callable[[], T]) -> T:
    """Run a call on an axis; on an `AsyncAxis` after its pending async calls."""
    if type(axis) is AsyncAxis and not axis.comm_thread.here:
        axis.comm_thread.drain()
    return work()


_comm_threads: weakref.WeakKeyDictionary[dist.ProcessGroup, CommThread] = weakref.WeakKeyDictionary()


def async_axis(axis: Axis) -> AsyncAxis:
    """The same axis, of several ranks, for async calls."""
    if isinstance(axis, AsyncAxis):
        return axis
    found = _comm_threads.get(axis.group)
    if found is None:
        found = _comm_threads.setdefault(axis.group, CommThread(axis))
    return AsyncAxis(axis.name, axis.rank, axis.size, axis.group, found)


# -- of device tensors

_streams: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[torch.device, torch.Stream]] = (
    weakref.WeakKeyDictionary()
)


def has_comm_stream(axis: Axis, x: Tensor) -> bool:
    """Whether an async call with this operand runs on a stream: on a device with streams, on several ranks."""
    if x.is_cpu or axis.size == 1 or _torch.is_fake(x) or x.device.type in ("meta", "mps"):
        return False
    kind = torch.accelerator.current_accelerator()
    return kind is not None and kind.type == x.device.type


def _stream_of(axis: Axis, device: torch.device) -> torch.Stream:
    """The communication stream of an axis; calls on different axes overlap."""
    found = _streams.setdefault(axis.group, {})
    if device not in found:
        found[device] = torch.Stream(device=device)
    return found[device]


class StreamItem:
    """One call on a communication stream; for the waiting rank like a `WorkItem`."""

    __slots__ = ("_done", "_error", "_launched_on", "_result", "_stream", "_x", "device")

    def __init__(self, work: Callable[[], Tensor], axis: Axis, x: Tensor) -> None:
        self.device, self._x = x.device, x
        self._error: Exception | None = None
        self._result: Tensor
        self._stream = _stream_of(axis, x.device)
        self._launched_on = torch.accelerator.current_stream(x.device)
        self._stream.wait_stream(self._launched_on)
        try:
            with self._stream, torch.no_grad():
                self._result = work()
        except Exception as error:  # as on the communication thread, `wait` raises it
            self._error = error
        self._done = self._stream.record_event()

    @property
    def over(self) -> bool:
        """Whether the call has ended on the device."""
        return self._error is not None or self._done.query()

    def wait(self) -> Tensor:
        """The result, which the current stream can read from here on; raises the error of the call."""
        if self._error is not None:
            raise self._error
        current = torch.accelerator.current_stream(self.device)
        current.wait_event(self._done)
        # Its memory belongs to the communication stream, which must not reuse it before this stream has read it.
        self._result.record_stream(current)
        if current != self._launched_on and self._x is not None:
            self._x.record_stream(self._stream)  # the stream to which it belongs has not waited
        self._x = None  # type: ignore[assignment]  # not used any more
        return self._result

    def then(self, call: Callable[[StreamItem], None]) -> None:
        """Call a function now, on the communication stream, behind the call."""
        with self._stream:
            call(self)

    def __del__(self) -> None:
        x = getattr(self, "_x", None)
        if x is not None:  # `wait` was not called
            x.record_stream(self._stream)
