"""The main program of a rank of MPI. Its parent is `pools.MpiPool`.

The rank listens at a socket, and waits there between two requests of the parent: waiting inside MPI would take a
core.
"""

from __future__ import annotations

import importlib
import os
import pickle
import warnings
from multiprocessing.connection import Listener
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import gradmesh
from benchmarks.speed.contenders import CONTENDERS
from benchmarks.speed.worker import Worker

__all__ = ["main"]


def main() -> None:
    """Serve the parent's requests until it sends None or exits."""
    torch.set_num_threads(1)
    mpi: Any = importlib.import_module("mpi4py.MPI")
    world = mpi.COMM_WORLD
    contenders = [CONTENDERS[name] for name in os.environ["GRADMESH_BENCH_NAMES"].split(",")]
    groups: dict[str, Any] = {"MPI": world}
    if any(contender.backend == "mpi4py" for contender in contenders):
        warnings.simplefilter("ignore")
        gradmesh.init(backend="mpi4py")
        groups["mpi4py"] = dist.group.WORLD
    worker = Worker(world.rank, contenders, groups, world.Barrier)
    address = str(Path(os.environ["GRADMESH_BENCH_AT"], str(world.rank)))
    key = os.environ["GRADMESH_BENCH_KEY"].encode()
    with Listener(address, authkey=key) as listener, listener.accept() as parent:
        try:
            # By plain pickle: a connection of multiprocessing would share tensors through yet another socket.
            while (request := pickle.loads(parent.recv_bytes())) is not None:
                method, args = request
                if method == "version":
                    line = mpi.Get_library_version().splitlines()[0]
                    answer = " ".join(line.replace("Version:", "").split())
                else:
                    answer = getattr(worker, method)(*args)
                parent.send_bytes(pickle.dumps(answer))
        except EOFError:
            world.Abort(1)


if __name__ == "__main__":
    main()
