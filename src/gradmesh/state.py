"""The state of a rank: what gradmesh keeps between two calls, one typed object.

It is a global of the process. Ranks that are threads of one process have one each, which their launcher makes and the
`threads` backend keeps. Nothing of it is a ContextVar, because autograd's own threads see none.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from gradmesh.backends import threads
from gradmesh.errors import OrderError, message

__all__ = [
    "ACTIVE_TRACERS",
    "Chain",
    "Deferral",
    "RankState",
    "Suspects",
    "Tracer",
    "UnwaitedCalls",
    "must_decompose",
    "rank_state",
    "run_to_end",
]


T = TypeVar("T")


class Chain(Protocol):
    """The collectives of an `ordered()` block, in order."""

    def link(self, op: Any, x: Tensor) -> Tensor:
        """Run an op as the next link."""

    def node(self, op: Any, run: Any) -> Any:
        """Run what makes several collectives in its backward as one link."""

    def begin(self, op: Any, x: Tensor) -> Any:
        """Begin an op as the next link."""

    def end(self, started: Any) -> Tensor:
        """Wait for an op that was begun, as the next link."""

    def refuse_reentrant(self, op: Any) -> None:
        """Refuse a collective that a reentrant checkpoint hides from the chain."""

    def keep_place(self) -> None:
        """Have a collective that is no link, in a region of a checkpoint, run again on every rank."""


class UnwaitedCalls:
    """The calls that this rank has begun and not waited for.

    Attributes:
        open: what was called, and where, for each that can still be waited for.
        lost: the same, of those that nobody holds any more.
        forgiven: how many times a call that was begun has failed; who began others before that may leave them.
    """

    def __init__(self) -> None:
        self.open: dict[int, str] = {}
        self.dropped: dict[int, str] = {}
        self.abandoned = 0

    def drop(self, number: int) -> None:
        """One of them was never sent: nobody has to wait for it."""
        self.open.pop(number, None)
        self.dropped.pop(number, None)

    def abandon(self) -> None:
        """A call has failed: the others may be left."""
        self.abandoned += 1
        self.open.clear()
        self.dropped.clear()

    def check(self, *, at_the_end: bool = False) -> None:
        """Refuse to go on past calls that nobody will wait for.

        Args:
            at_the_end: nothing is waited for any more.

        Raises:
            OrderError: there are some.
        """
        never = [*self.dropped.values(), *(self.open.values() if at_the_end else ())]
        if not never:
            return
        self.abandon()
        raise OrderError(
            message(
                "a call that was begun was never waited for",
                op="async_op",
                expected="wait() for each call with async_op=True",
                got="\n".join(never),
                remedy="call wait() where the result is needed; its place is also where backward begins",
            )
        )


class Deferral(Protocol):
    """What backward owes to leaves, put off by `no_sync`."""

    def recorded(self, op: Any, x: Tensor, call: Any, run: Callable[[], T]) -> T:
        """Make a call that becomes a node of the graph."""


class Suspects(Protocol):
    """What the level "full" found in a backward pass, to be reported unless it changes."""

    def report(self) -> None:
        """Warn of what has not changed, and forget all."""


class Tracer(Protocol):
    """What follows tensors through the library's calls: `gradmesh.typed`, `gradmesh check`.

    Attributes:
        plain: whether a layer that makes several calls with a derivative of its own is to make them one by one, with
            that of autograd.
    """

    plain: bool

    def begins(self, op: Any, x: Tensor, recorded: Any) -> None:
        """Hear of a call that another thread is about to make."""

    def follow(self, op: Any, x: Tensor, recorded: Any, run: Callable[[], Tensor]) -> Tensor:
        """Run an op of the library, and note what its result is."""

    def declare(self, x: Tensor, axis: Any, kind: Any) -> None:
        """Take a tensor for what the library itself says it is."""


ACTIVE_TRACERS = [0]
"""How many tracers there are in this process: mostly none, and then no rank has one."""


def must_decompose() -> bool:
    """Whether a layer is to make its calls one by one, for who follows them; see `Tracer`."""
    tracer = rank_state().tracer if ACTIVE_TRACERS[0] else None
    return tracer is not None and tracer.plain


class _OfThread(threading.local):
    """What each thread of a rank has for itself: a program may train in two threads, in groups of their own."""

    def __init__(self) -> None:
        # No attribute of the class: Dynamo of torch 2.11 would read that one, and not the thread's.
        self.chain: Chain | None = None
        self.coalescing: Any = None
        self.deferred: Deferral | None = None


@dataclass(slots=True)
class RankState:
    """What a rank keeps.

    Attributes:
        mesh: the current mesh.
        mesh_world: the world that it was made in; in another one it counts for nothing.
        check: how much is compared (`gradmesh.checking`); None: what the environment says.
        tracer: what follows tensors through the library's calls.
        suspects: what the level "full" found, to be reported when a gradient is used.
        reorderable: whether a compiler may move the collectives of the programs that it makes now.
        posted: messages that were sent and may not have gone yet, each with the memory that it is sent from.
        waits_at_exit: whether the process waits for them when it ends.
        begun: the calls that were begun and not waited for.
        kept: what parts of the library that the data path does not know of keep for the rank, by its class.
    """

    mesh: DeviceMesh | None = None
    mesh_world: dist.ProcessGroup | None = None
    check: int | None = None
    suspects: Suspects | None = None
    reorderable: bool = False
    tracer: Tracer | None = None
    posted: deque[tuple[Tensor, dist.Work]] = field(default_factory=deque)
    waits_at_exit: bool = False
    started: UnwaitedCalls = field(default_factory=UnwaitedCalls)
    objects: dict[type, Any] = field(default_factory=dict)
    _of_thread: _OfThread = field(default_factory=_OfThread)

    @property
    def coalescing(self) -> Any:
        """The block of `coalesce()` that is open in this thread."""
        return self._of_thread.coalescing

    @coalescing.setter
    def coalescing(self, block: Any) -> None:
        self._of_thread.coalescing = block

    @property
    def chain(self) -> Chain | None:
        """The collectives of the `ordered()` block that is open in this thread."""
        return self._of_thread.chain

    @chain.setter
    def chain(self, chain: Chain | None) -> None:
        self._of_thread.chain = chain

    @property
    def deferred(self) -> Deferral | None:
        """What this thread has put off; None: it never did."""
        return self._of_thread.deferred

    @deferred.setter
    def deferred(self, deferred: Deferral | None) -> None:
        self._of_thread.deferred = deferred

    def put(self, value: object) -> None:
        """Keep an object, in the place of one of the same class."""
        self.objects[type(value)] = value

    def get(self, kind: type[T]) -> T | None:
        """The object of that class that is kept."""
        found: T | None = self.objects.get(kind)
        return found

    def get_or_create(self, kind: type[T]) -> T:
        """The object of that class that is kept; made without arguments and kept where there is none."""
        found: T | None = self.objects.get(kind)
        if found is None:
            found = self.objects[kind] = kind()
        return found

    def drop(self, kind: type) -> None:
        """Keep the object of that class no longer."""
        self.objects.pop(kind, None)


_process_state = RankState()


def rank_state() -> RankState:
    """The state of the calling rank: of its thread under the `threads` backend, else of the process."""
    found = threads.rank_locals()
    return found if isinstance(found, RankState) else _process_state


def run_to_end(run: Callable[[], T]) -> T:
    """Run the function of a rank to its end, and see that it has waited for what it has begun.

    Raises:
        OrderError: it has not.
    """
    started = rank_state().started
    try:
        result = run()
        started.check(at_the_end=True)
    finally:
        started.abandon()
    return result
