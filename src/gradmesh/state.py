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

__all__ = ["Chain", "Owes", "RankState", "rank_state"]


T = TypeVar("T")


class Chain(Protocol):
    """The collectives of an `ordered()` block, in order."""

    def link(self, op: Any, x: Tensor) -> Tensor:
        """Run an op as the next link."""

    def refuse_reentrant(self, op: Any) -> None:
        """Refuse a collective that a reentrant checkpoint hides from the chain."""

    def keep_place(self) -> None:
        """Have a collective that is no link, in a region of a checkpoint, run again on every rank."""


class Owes(Protocol):
    """What backward owes to leaves, put off by `no_sync`."""

    def recorded(self, op: Any, x: Tensor, call: Any, run: Callable[[], T]) -> T:
        """Make a call that becomes a node of the graph."""


class _OfThread(threading.local):
    """What each thread of a rank has for itself: a program may train in two threads, in groups of their own."""

    def __init__(self) -> None:
        # No attribute of the class: Dynamo of torch 2.11 would read that one, and not the thread's.
        self.chain: Chain | None = None
        self.owed: Owes | None = None


@dataclass(slots=True)
class RankState:
    """What a rank keeps.

    Attributes:
        mesh: the current mesh.
        mesh_world: the world that it was made in; in another one it counts for nothing.
        check: how much is compared (`gradmesh.checking`); None: what the environment says.
        reorderable: whether a compiler may move the collectives of the programs that it makes now.
        posted: messages that were sent and may not have gone yet, each with the memory that it is sent from.
        waits_at_exit: whether the process waits for them when it ends.
        kept: what parts of the library that the data path does not know of keep for the rank, by its class.
    """

    mesh: DeviceMesh | None = None
    mesh_world: dist.ProcessGroup | None = None
    check: int | None = None
    reorderable: bool = False
    posted: deque[tuple[Tensor, dist.Work]] = field(default_factory=deque)
    waits_at_exit: bool = False
    kept: dict[type, Any] = field(default_factory=dict)
    _of_thread: _OfThread = field(default_factory=_OfThread)

    @property
    def chain(self) -> Chain | None:
        """The collectives of the `ordered()` block that is open in this thread."""
        return self._of_thread.chain

    @chain.setter
    def chain(self, chain: Chain | None) -> None:
        self._of_thread.chain = chain

    @property
    def owed(self) -> Owes | None:
        """What this thread has put off; None: it never did."""
        return self._of_thread.owed

    @owed.setter
    def owed(self, owed: Owes | None) -> None:
        self._of_thread.owed = owed

    def keep(self, value: object) -> None:
        """Keep an object, in the place of one of the same class."""
        self.kept[type(value)] = value

    def find(self, kind: type[T]) -> T | None:
        """The object of that class that is kept."""
        found: T | None = self.kept.get(kind)
        return found

    def drop(self, kind: type) -> None:
        """Keep the object of that class no longer."""
        self.kept.pop(kind, None)


_process_state = RankState()


def rank_state() -> RankState:
    """The state of the calling rank: of its thread under the `threads` backend, else of the process."""
    found = threads.rank_locals()
    return found if isinstance(found, RankState) else _process_state
