"""The `shm` backend of torch.distributed: the ranks are processes of one host, and hand tensors on through its memory.

It is for CPU tensors. `torch.distributed.init_process_group("shm")` and `new_group(backend="shm")` make its groups once
gradmesh is imported. It is written in Python: torch copies and adds, the kernel puts to sleep and wakes up.

How it works, from the bottom:

* The ranks find each other through the store (`bootstrap`), and map one anonymous piece of memory. In it (`buffers`)
  each rank has two chunks of 1 MiB, bounce buffers through which everything goes, and a few words of 8 bytes that it
  alone writes; each pair of ranks has a ring of bytes. Who is still there is seen through pidfds (`peers`, `segment`).
* A collective goes through phases (`phases`): write a chunk, publish a counter, wait until all have, read the others'
  chunks. That is a flat barrier, a flag for each rank that all the others read (Mellor-Crummey and Scott 1991 compare
  barriers), and the chunks are used in turn (double buffering), so that one wait a phase is enough. What is longer than
  a chunk takes several phases. With the first one travels the `head` of the call (`heads`); where heads differ all
  ranks raise.
* What each collective writes and reads is in `collectives`, as generators that yield where they have to wait. Sums are
  reduce-scatter and all-gather in one where more than two ranks share the work (Rabenseifner 2004), and always in rank
  order, so that the bits are the same everywhere.
* Messages from rank to rank (`p2p`) go through the rings: eager as far as a ring has room, which is the eager limit;
  the rest follows as the receiver makes room, so that a long message meets its receiver (rendezvous).
* A rank waits (`waiting`) by looking a few hundred times and then sleeping on the word that will change (`futex`).
* The `engine` of a group has the queue of calls that were begun, and goes on with them; all engines of a process are
  driven by whoever waits, or else by the progress thread (`progress`). `works` are what torch holds of a call.
* `group` is torch's method table: it checks and flattens tensors (`tensors`) and puts steps into the engine. `direct`
  has the calls of gradmesh's own data path, which take a short cut past queue and works where one chunk is enough
  (`motions`), and are the same calls to the other ranks.
"""

from __future__ import annotations

import threading
from typing import Any

import torch.distributed as dist

from gradmesh.backends.shm import futex
from gradmesh.backends.shm.group import ShmGroup
from gradmesh.backends.shm.runs import run
from gradmesh.backends.shm.segment import Segment
from gradmesh.backends.timeouts import timeout_of_group
from gradmesh.errors import ArgumentError, message

__all__ = ["available", "default", "register", "run"]

_register_lock = threading.Lock()


def available() -> bool:
    """Whether this system has what the backend needs: Linux, on a processor whose system calls it knows."""
    return futex.supported()


def default() -> str:
    """The backend for CPU ranks that are processes of one host: "shm" where it runs, else "gloo"."""
    return "shm" if available() else "gloo"


def register() -> None:
    """Make `shm` known to torch.distributed; calling it again does nothing."""
    with _register_lock:
        if not hasattr(dist.Backend, "SHM"):
            dist.Backend.register_backend("shm", _create, extended_api=True, devices=["cpu"])


def _create(options: Any, _backend_options: object) -> ShmGroup:
    if not available():
        raise ArgumentError(
            message(
                "the shm backend does not run on this system",
                expected="Linux on x86-64 or aarch64",
                got="another system",
                remedy="use backend='gloo'",
            )
        )
    timeout = timeout_of_group(options.timeout)
    names = list(options.global_ranks_in_group) or list(range(options.group_size))
    segment = Segment(
        options.store,
        options.group_rank,
        options.group_size,
        names,
        timeout.total_seconds(),
        options.group_id,
    )
    return ShmGroup(segment, timeout, options.group_id)
