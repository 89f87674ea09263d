"""The `shm` backend of torch.distributed: ranks are processes of one host that exchange tensors in shared memory.

It supports CPU tensors. `torch.distributed.init_process_group("shm")` and `new_group(backend="shm")` create its groups
once gradmesh is imported. Torch copies and adds, or native.c; the kernel handles sleeping and waking.

The modules, bottom up:

* `shared_memory`: the ranks rendezvous through the store and map an anonymous segment. It contains, for each rank,
  two chunks of 1 MiB as bounce buffers and a few lines of the cache that only this rank writes; and a ring buffer
  for each pair of ranks. Live processes are tracked with pidfds. A rank sleeps on the word that will change (futex).
* `engine`: a collective proceeds in epochs: write a chunk, publish a counter, wait until all ranks have, read their
  chunks. This is a flat barrier with a flag for each rank (Mellor-Crummey and Scott 1991 compare barriers); the two
  chunks alternate (double buffering), so that one wait per epoch is enough. Data longer than a chunk takes several
  epochs. In the first one the ranks also publish the call's hash; if hashes differ, all ranks raise.
  A rank waits by polling a few hundred times and then sleeping. The engine of a group has the queue of pending calls;
  all engines of a process are advanced by any waiting thread, otherwise by the progress thread.
* `data_path` copies tensors into shared memory and out of it, for each collective, as generators that yield to wait.
  With more than two ranks, large sums are a reduce-scatter and an all-gather (Rabenseifner 2004). Sums are in rank
  order, so that results are bitwise identical on every rank. Its `DirectCalls` make a call at once, in native.c if
  it is there and one chunk is enough. All ways are interchangeable between ranks.
* Point-to-point messages (`p2p`) use the ring buffers: eager up to the free space of the ring; the rest follows as the
  receiver reads (rendezvous).
* `group` is the process group: it queues calls in the engine. `FlatGroup` checks and flattens torch's tensors for it.
"""

from __future__ import annotations

import platform
from typing import Any

from gradmesh.backends.own_group import timeout_of_group
from gradmesh.backends.shm import shared_memory
from gradmesh.backends.shm.group import ShmGroup
from gradmesh.backends.shm.shared_memory import Segment, run
from gradmesh.errors import ArgumentError

__all__ = ["available", "create", "default", "run"]


def available() -> bool:
    """Whether the backend supports this system: Linux on a supported processor."""
    return shared_memory.supported()


def default() -> str:
    """The default backend for CPU process ranks on one host: "shm" if supported, else "gloo"."""
    return "shm" if available() else "gloo"


def create(options: Any, _backend_options: object) -> ShmGroup:
    """A group; torch.distributed calls this."""
    if not available():
        raise ArgumentError.of(
            "the shm backend does not support this system",
            expected="Linux on x86-64, aarch64, riscv64 or ppc64le",
            got=f"{platform.system()} on {platform.machine()}",
            remedy="use backend='gloo'",
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
