"""The `threads` backend of torch.distributed: ranks are threads of one process.

It supports CPU tensors, and is meant for tests, notebooks and debuggers: a rank starts in a millisecond, mismatched
collectives raise on every rank with a table of all calls, and a deadlock is reported within a second. It needs neither
a network nor a second interpreter.

`gradmesh.launch(fn, 4, backend="threads")` starts the ranks. In each of them `torch.distributed` shows that rank's
world: `get_rank()`, `new_group`, DeviceMesh, functional collectives and DDP work as in a separate process, and so does
torch's default random generator. The ranks share the rest of the process: module globals, `os.environ` and the
arguments of the launch. A thread that a rank starts is not a rank.

The modules, bottom up:

* `rendezvous`: a `World` tracks whether each rank runs, waits, or has ended. A waiting rank sleeps on a lock (its
  gate). If no rank runs and nothing can complete, that is a deadlock, and every waiting rank raises an error that lists
  all pending calls. The n-th call of each rank goes to the n-th `Rendezvous` of the group; the last rank to arrive does
  the work for all while the others sleep. It compares the contributions first, so that mismatched calls raise on every
  rank. Messages are copied and stored until they are received (always eager). The tensors of all ranks are moved or
  summed directly, in rank order.
* `group` implements torch's interface, with one object per rank. `get_future` waits and returns a completed future:
  otherwise a callback would run in the thread of the last rank, and see that rank's world.
* A world may have an `Observer` that intercepts every call, such as the simulator of `gradmesh.verify`.
* `gradmesh._torch` switches the world that a thread sees; `seated` below assigns a thread to a rank.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from gradmesh import _torch
from gradmesh.backends.own_group import timeout_of_group
from gradmesh.errors import ArgumentError

if TYPE_CHECKING:
    from gradmesh.backends.threads.group import ThreadsGroup
    from gradmesh.backends.threads.rendezvous import World

__all__ = ["here", "register", "seated", "stand_in"]


@dataclasses.dataclass(slots=True)
class _Seat:
    """A rank's thread in its world."""

    world: World
    rank: int
    # the number of groups of each name that this rank has created: a name may be reused after destruction
    made: dict[object, int] = dataclasses.field(default_factory=dict)


class _Here(threading.local):
    """In the threads that are ranks, the seat and the object that was passed to `seated`."""

    def __init__(self) -> None:
        self.seat: _Seat | None = None
        self.kept: Any = None


here = _Here()


@contextlib.contextmanager
def seated(world: World, rank: int, kept: object) -> Iterator[None]:
    """Make the calling thread a rank of the world, and store an object in `here.kept`."""
    here.seat, here.kept = _Seat(world, rank), kept
    _torch.adopt_thread(world.seed + rank)
    # Keep backward on the rank's thread for every device, since other threads do not belong to a rank.
    world.rank_of_thread[threading.get_ident()] = rank
    try:
        with torch.autograd.set_multithreading_enabled(False):
            yield
    finally:
        del world.rank_of_thread[threading.get_ident()]


def stand_in() -> Callable[[], None]:
    """Returns a function that lets another thread act on behalf of the calling rank.

    That thread does not count as a rank: while it waits, its rank does not wait.
    """
    seat, kept, adopt = here.seat, here.kept, _torch.stand_in()

    def take_place() -> None:
        here.seat, here.kept = seat, kept
        adopt()

    return take_place


_register_lock = threading.Lock()


def register() -> None:
    """Register `threads` with torch.distributed; idempotent."""
    with _register_lock:
        if not hasattr(dist.Backend, "THREADS"):
            dist.Backend.register_backend("threads", _create, extended_api=True, devices=["cpu"])


def _create(options: Any, _backend_options: object) -> ThreadsGroup:
    if (seat := here.seat) is None:
        raise ArgumentError.of(
            "the threads backend can only be used in thread ranks",
            expected="a thread that was started by gradmesh.launch",
            got=f"thread {threading.current_thread().name!r}",
            remedy="run the function with gradmesh.launch(fn, nprocs, backend='threads')",
        )
    # The modules of the backend are loaded with the first group.
    from gradmesh.backends.threads.group import ThreadsGroup
    from gradmesh.backends.threads.rendezvous import Group

    ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
    made = seat.made.get((options.group_id, ranks), 0)
    seat.made[options.group_id, ranks] = made + 1
    shared = Group.of(seat.world, (options.group_id, ranks, made), options.group_id, ranks)
    return ThreadsGroup(shared, options.group_rank, timeout_of_group(options.timeout))
