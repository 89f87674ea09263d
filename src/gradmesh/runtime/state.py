"""The state that gradmesh keeps between calls, one object per rank.

It is a global of the process; ranks that are threads of one process have one each, stored by the `threads` backend. It
uses no ContextVar, because autograd's own threads do not inherit them.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from gradmesh import _torch
from gradmesh._util.environment import CHECK
from gradmesh.backends import threads
from gradmesh.errors import OrderError

T = TypeVar("T")


class Chain(Protocol):
    """The ordered ops of an `ordered()` block."""

    def link(self, op: Any, x: Tensor) -> Tensor:
        """Run an op as the next ordered op."""

    def node(self, op: Any, x: Tensor, run: Any) -> Any:
        """Run a node whose backward makes several collectives as one ordered op."""

    def begin(self, op: Any, x: Tensor) -> Any:
        """Start an async op as the next ordered op."""

    def end(self, started: Any) -> Tensor:
        """Wait for an async op, as the next ordered op."""

    def refuse_reentrant(self, op: Any) -> None:
        """Raise for a collective that a reentrant checkpoint hides."""

    def keep_place(self, device: Any) -> None:
        """Make every rank recompute a collective that is not an ordered op, in a checkpointed region."""


class UnwaitedCalls:
    """The async calls of this rank that were not waited for."""

    def __init__(self) -> None:
        self.open: dict[int, str] = {}  # the call and its call site, for each that can still be waited for
        self.dropped: dict[int, str] = {}  # the same for those whose `Pending` was garbage collected
        self.abandoned = 0  # failures; a call that was pending at one need not be waited for

    def drop(self, number: int) -> None:
        """Remove a call that was never sent."""
        self.open.pop(number, None)
        self.dropped.pop(number, None)

    def abandon(self) -> None:
        """Forget all pending calls, after a call has failed."""
        self.abandoned += 1
        self.open.clear()
        self.dropped.clear()

    def check(self, *, at_the_end: bool = False) -> None:
        """Raise if calls can no longer be waited for; open calls count too `at_the_end` of the program."""
        never = [*self.dropped.values(), *(self.open.values() if at_the_end else ())]
        if not never:
            return
        self.abandon()
        raise OrderError.of(
            "an async collective was never waited for",
            op="async_op",
            expected="wait() for each call with async_op=True",
            got="\n".join(never),
            remedy="keep the returned Pending and call y = pending.wait() where the result is needed",
        )


class Deferral(Protocol):
    """Gradient reductions deferred by `no_sync`."""

    def recorded(self, op: Any, x: Tensor, call: Any, run: Callable[[], T]) -> T:
        """Run a call as a node of the graph whose backward reduction may be deferred."""


class Suspects(Protocol):
    """What the level "full" found in a backward pass, to be reported unless it changes."""

    def report(self) -> None:
        """Warn of what has not changed, and forget all."""


class DeferredCheck(Protocol):
    """The comparison of calls after they were made; see `gradmesh.transport.deferred_check`."""

    def at_once(self, axis: Any) -> contextlib.AbstractContextManager[None]:
        """The block makes a call that is compared at once."""

    def flush(self, logs: Iterable[Any] | None = None) -> None:
        """Wait until the calls that this rank has made, or those in some logs, were compared."""

    def finish(self) -> None:
        """The function of the rank has returned: compare its last calls."""

    def verdict(self, error: Exception) -> Exception | None:
        """The error that a failed call of a backend is a consequence of, if there is one."""


class Instrument:
    """Watches the calls of one rank; `installed` registers it. Each event does nothing unless a subclass overrides it.

    Instruments are `gradmesh.typed`, `gradmesh check`, `timeline` and `delayed`. Three watchers are not, because what
    they watch is not a call of gradmesh: the profile function of `gradcheck` (calls of torch.distributed and of
    Functions of the program), the `Observer` of a world of threads (when a rank runs), and torch's profiler, which is
    asked for at each call.
    """

    # whether layers with a custom autograd.Function must issue their collectives individually instead
    plain: bool = False

    def queued(self, op: Any, x: Tensor, recorded: Any) -> None:
        """An async call is passed to the communication thread, by the thread that starts it."""

    def called(self, op: Any, x: Tensor, recorded: Any, run: Callable[[], Tensor]) -> Tensor:  # noqa: ARG002
        """An op runs, on the thread that makes the call; returns the result of `run`."""
        return run()

    def sending(self, transport: Any) -> Any:
        """A call is about to send; returns the transport that it uses, for example one that wraps this one."""
        return transport

    def waited(self, job: Any, begin: float, end: float) -> None:
        """A wait for an async call (a `WorkItem`) has ended, on the waiting thread; times of `time.perf_counter`."""

    def declared(self, x: Tensor, axis: Any, kind: Any) -> None:
        """The library declares the type of a tensor."""


INSTALLED = [0]
"""Number of installed instruments in the process; the only test of a call that is not watched."""

_installing = threading.Lock()


@contextlib.contextmanager
def installed(instrument: Instrument, *, innermost: bool = False) -> Iterator[None]:
    """Have an instrument watch the calls of this rank in the block, in any thread.

    With `innermost` it is inside of the instruments that are installed already instead of outside.
    """
    state = rank_state()
    with _installing:  # replaced, never mutated: other threads iterate over it
        others = state.instruments
        state.instruments = (instrument, *others) if innermost else (*others, instrument)
        INSTALLED[0] += 1
    try:
        yield
    finally:
        with _installing:
            state.instruments = tuple(other for other in state.instruments if other is not instrument)
            INSTALLED[0] -= 1


def instruments() -> tuple[Instrument, ...]:
    """The instruments of the calling rank, innermost first."""
    return rank_state().instruments if INSTALLED[0] else ()


def watched(op: Any, x: Tensor, recorded: Any, run: Callable[[], Tensor]) -> Tensor:
    """Run an op, with the calling rank's instruments around it."""
    for each in rank_state().instruments:
        run = partial(each.called, op, x, recorded, run)
    return run()


def must_decompose() -> bool:
    """True if layers must issue their collectives individually because an instrument watches them."""
    return any(each.plain for each in instruments())


class OfThread(threading.local):
    """State per thread of a rank: a program may train in two threads, with separate groups."""

    def __init__(self) -> None:
        # Not class attributes: Dynamo of torch 2.11 would read those instead of the thread's.
        self.chain: Chain | None = None  # the open `ordered()` block
        self.coalescing: Any = None  # the open `coalesce()` block
        self.deferred: Deferral | None = None  # the deferred reductions; None: `no_sync` was never used


@dataclass(slots=True)
class RankState:
    """The state of one rank."""

    mesh: DeviceMesh | None = None  # the current mesh
    # the world group that it was made in; the mesh is ignored in any other
    mesh_world: dist.ProcessGroup | None = None
    # the check level (`gradmesh.runtime.checking`); None: that of the environment variable
    check: int | None = None
    suspects: Suspects | None = None  # what the level "full" found, to be reported when a gradient is used
    # the comparison of calls after they were made; None: no call was deferred
    deferred_check: DeferredCheck | None = None
    launched: int = 0  # how many functions of a launch it has started
    # whether compilers may reorder the collectives of functions that are compiled now
    reorderable: bool = False
    instruments: tuple[Instrument, ...] = ()  # what watches the rank's calls, innermost first
    # pending point-to-point sends, each with the tensor that it is sent from
    posted: deque[tuple[Tensor, dist.Work]] = field(default_factory=deque)
    waits_at_exit: bool = False  # whether the process waits for them at exit
    started: UnwaitedCalls = field(default_factory=UnwaitedCalls)  # the async calls that were not waited for
    # objects that other modules store for the rank, by class
    objects: dict[type, Any] = field(default_factory=dict)
    of_thread: OfThread = field(default_factory=OfThread)  # what each of its threads has

    def put(self, value: object) -> None:
        """Store an object, replacing one of the same class."""
        self.objects[type(value)] = value

    def get(self, kind: type[T]) -> T | None:
        """The stored object of a class."""
        found: T | None = self.objects.get(kind)
        return found

    def get_or_create(self, kind: type[T]) -> T:
        """The stored object of a class; created without arguments if there is none."""
        found: T | None = self.objects.get(kind)
        if found is None:
            found = self.objects[kind] = kind()
        return found

    def drop(self, kind: type) -> None:
        """Remove the stored object of a class."""
        self.objects.pop(kind, None)


_process_state = RankState()


def rank_state() -> RankState:
    """The state of the calling rank: of its thread under the `threads` backend, else of the process."""
    found: RankState | None = threads.here.kept
    return _process_state if found is None else found


CHECK_BLOCKS = [0]
"""Number of open `gradmesh.check` blocks in the process; fast-path check, normally 0."""


def check_level() -> int:
    """The current check level on this rank: 0 or one of those in `gradmesh.runtime.checking`."""
    level = rank_state().check if CHECK_BLOCKS[0] else None
    if level is not None:
        return level
    return CHECK.kept[0] if CHECK.kept else CHECK.value()


RETURNED = "gradmesh/returned/{}"
"""The key in the store under which a rank says that it returned, to those that it is not connected to."""


def run_to_end(run: Callable[[], T]) -> T:
    """Run the function of a rank.

    Raises:
        OrderError: it returned without waiting for an async call.
        MismatchError: the deferred check found that its calls differ from those of another rank.
    """
    state = rank_state()
    started = state.started
    state.launched += 1
    try:
        result = run()
        started.check(at_the_end=True)
        if state.deferred_check is not None:
            state.deferred_check.finish()
        if dist.is_initialized() and state is _process_state and not getattr(state.deferred_check, "off", ""):
            with contextlib.suppress(RuntimeError, AttributeError):  # its host has ended, or there is none
                _torch.default_store().set(RETURNED.format(dist.get_rank()), str(state.launched))
    finally:
        started.abandon()
    return result
