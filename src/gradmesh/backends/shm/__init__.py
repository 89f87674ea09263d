"""The `shm` backend of torch.distributed: the ranks are processes of one host, and hand tensors on through its memory.

It is for CPU tensors. `torch.distributed.init_process_group("shm")` and `new_group(backend="shm")` make its groups once
gradmesh is imported. It is written in Python: torch copies and adds, the kernel puts to sleep and wakes up.
"""

from __future__ import annotations

import threading
from typing import Any

import torch.distributed as dist

from gradmesh.backends.shm import futex
from gradmesh.backends.shm.group import ShmGroup
from gradmesh.backends.shm.segment import Segment
from gradmesh.errors import ArgumentError, message

__all__ = ["available", "default", "register"]

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
    names = list(options.global_ranks_in_group) or list(range(options.group_size))
    segment = Segment(
        options.store,
        options.group_rank,
        options.group_size,
        names,
        options.timeout.total_seconds(),
        options.group_id,
    )
    return ShmGroup(segment, options.timeout, options.group_id)
