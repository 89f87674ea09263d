"""The `threads` backend of torch.distributed: the ranks are threads of one process, and share its memory.

It is for CPU tensors, for tests, notebooks and debuggers: a rank starts in a millisecond, a collective that
the ranks call differently is an error on every rank with a table of who called what, and a deadlock is
reported within a second. It needs no network and no second Python.

`gradmesh.launch(fn, 4, backend="threads")` starts the ranks. In each of them `torch.distributed` shows that
rank's own world: `get_rank()`, `new_group`, DeviceMesh, functional collectives, DDP work as in a process of
their own. What the ranks still share is the rest of the process: module globals, `os.environ`, the arguments
of the launch, and torch's default random generator, so that a draw on one rank moves the others' (use a
`torch.Generator` per rank). A thread that a rank starts is not a rank.

How it works, from the bottom:

* A `World` (`waiting`) knows of every rank whether it runs, waits, or has gone. A rank that waits sleeps on a lock of
  its own, its gate; when no rank runs and nothing can complete, that is a deadlock, and everybody who waits is told who
  waits where.
* The ranks of a group meet (`rendezvous`): the n-th call of each goes to the n-th `Rendezvous` of the group, and the
  rank that arrives last does the work for all, while the others sleep. It compares the contributions first, so that
  mismatched calls are an error on every rank. Messages are copied and kept until they are received (always eager).
* What is done with the tensors of all ranks, which lie in one memory, is in `collectives`: pieces are moved, or summed
  in rank order, without a copy in between.
* `group` is torch's method table, one object for each rank. A future is complete when it is handed out, which means
  that `get_future` waits: a callback would run in the thread of the rank that came last, and see that rank's world.
* A world may have an observer (`observing`), through which every call goes: the simulator of `gradmesh.verify` is one.
* Which world a thread sees is switched in `gradmesh._torch`; a thread is given its place by `seated`, below.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from gradmesh import _torch
from gradmesh.backends.threads.group import ThreadsGroup
from gradmesh.backends.threads.rendezvous import Group
from gradmesh.backends.threads.waiting import World
from gradmesh.backends.timeouts import timeout_of_group
from gradmesh.errors import ArgumentError, message

__all__ = ["rank_locals", "register", "seated", "stand_in"]


@dataclasses.dataclass(slots=True)
class _Seat:
    """The place of a rank's thread in its world."""

    world: World
    rank: int
    made: dict[object, int] = dataclasses.field(default_factory=dict)
    """How many groups of each name this rank has made: a name can come back after a group was destroyed."""


_here = threading.local()  # .seat and .kept, in the threads that are ranks


def rank_locals() -> object:
    """What the calling rank keeps, as it was handed to `seated`; None in a thread that is no rank of a threads world.

    >>> rank_locals() is None
    True
    """
    return getattr(_here, "kept", None)


@contextlib.contextmanager
def seated(world: World, rank: int, kept: object) -> Iterator[None]:
    """Make the calling thread that rank of the world, and keep an object for it, which `rank_locals` returns."""
    _here.seat = _Seat(world, rank)
    _here.kept = kept
    _torch.adopt_thread(world.seed + rank)
    # Backward stays on the rank's thread for every device, or it would not know which rank it is.
    world.rank_of_thread[threading.get_ident()] = rank
    try:
        with torch.autograd.set_multithreading_enabled(False):
            yield
    finally:
        del world.rank_of_thread[threading.get_ident()]


def stand_in() -> Callable[[], None]:
    """What lets another thread act for the rank of the calling one, when it is called there.

    That thread is no rank: while it waits, its rank does not.
    """
    seat, kept, adopt = _here.seat, _here.kept, _torch.stand_in()

    def take_place() -> None:
        _here.seat, _here.kept = seat, kept
        adopt()

    return take_place


_register_lock = threading.Lock()


def register() -> None:
    """Make `threads` known to torch.distributed; calling it again does nothing."""
    with _register_lock:
        if not hasattr(dist.Backend, "THREADS"):
            dist.Backend.register_backend("threads", _create, extended_api=True, devices=["cpu"])


def _create(options: Any, _backend_options: object) -> ThreadsGroup:
    seat: _Seat | None = getattr(_here, "seat", None)
    if seat is None:
        raise ArgumentError(
            message(
                "the threads backend needs ranks that are threads",
                expected="a thread that gradmesh.launch started",
                got=f"thread {threading.current_thread().name!r}",
                remedy="run the function with gradmesh.launch(fn, nprocs, backend='threads')",
            )
        )
    ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
    made = seat.made.get((options.group_id, ranks), 0)
    seat.made[options.group_id, ranks] = made + 1
    shared = Group.of(seat.world, (options.group_id, ranks, made), options.group_id, ranks)
    return ThreadsGroup(shared, options.group_rank, timeout_of_group(options.timeout))
