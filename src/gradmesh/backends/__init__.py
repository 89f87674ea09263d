"""gradmesh's backends for torch.distributed.

`shm` is for process ranks on one host, `threads` for thread ranks, `hosts` for several hosts with several ranks each,
`mpi4py` for ranks that MPI has started.

All are pure Python subclasses of torch's `ProcessGroup`. They share:

    own_group.py  PythonGroup: the interface of a group for torch.distributed, under the names of all its versions;
                  FlatGroup: torch's collectives by movements of flat tensors, of shm, hosts and mpi4py;
                  OwnGroup: that for gradmesh's data path, of shm and threads; torch's `Work` of a pending call,
                  several works as one, and futures; reductions, flat tensors and errors
"""

from __future__ import annotations

import importlib
import threading
from functools import partial
from typing import Any

import torch.distributed as dist

__all__ = ["register"]

_register_lock = threading.Lock()


def register() -> None:
    """Register the backends of processes with torch.distributed; idempotent. Their modules are imported on use."""
    with _register_lock:
        for name, module in (("shm", "shm"), ("hosts", "hosts"), ("mpi4py", "mpi")):
            if not hasattr(dist.Backend, name.upper()):
                create = partial(_create, module)
                dist.Backend.register_backend(name, create, extended_api=True, devices=["cpu"])


def _create(module: str, options: Any, backend_options: object) -> Any:
    return importlib.import_module(f"gradmesh.backends.{module}").create(options, backend_options)
