"""gradmesh's backends for torch.distributed: `shm` for process ranks on one host, `threads` for thread ranks.

Both are pure Python subclasses of torch's `ProcessGroup`. They share:

    own_group.py  OwnGroup: the interface of a group for torch.distributed and for gradmesh's data path; torch's
                  `Work` of a pending call, several works as one, and futures; reductions and errors of both;
                  the names under which torch's versions call a group's methods
"""

from __future__ import annotations

import threading
from typing import Any

import torch.distributed as dist

__all__ = ["register_shm"]

_register_lock = threading.Lock()


def register_shm() -> None:
    """Register `shm` with torch.distributed; idempotent. Its modules are imported with the first group."""
    with _register_lock:
        if not hasattr(dist.Backend, "SHM"):
            dist.Backend.register_backend("shm", _create, extended_api=True, devices=["cpu"])


def _create(options: Any, backend_options: object) -> dist.ProcessGroup:
    from gradmesh.backends import shm

    return shm.create(options, backend_options)
