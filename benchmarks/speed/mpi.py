"""MPI, by mpi4py: the collective into memory that is there already, and as backward its adjoint.

What is in place in torch.distributed is in place here too. mpi4py is imported on MPI's own ranks alone.
"""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import Tensor

from benchmarks.speed.calls import Calls, Maker, Place, in_turn
from benchmarks.systems.cases import ROOT

__all__ = ["CALLS", "absent", "launcher"]


def launcher() -> str | None:
    """The mpiexec beside this Python, as a wheel brings it, else the one on the path."""
    beside = Path(sys.executable).parent / "mpiexec"
    return str(beside) if beside.exists() else shutil.which("mpiexec")


@cache
def absent() -> str | None:
    """Why there is no MPI here, or none that starts two ranks."""
    if find_spec("mpi4py") is None:
        return "no mpi4py: pip install mpi4py"
    if (path := launcher()) is None:
        return "no mpiexec: pip install mpich"
    program = "from mpi4py import MPI; print(MPI.COMM_WORLD.allreduce(1))"
    command = [path, "-n", "2", sys.executable, "-c", program]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=120, check=False, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{path} starts no ranks: {error}"
    # mpiexec may join the lines of the ranks.
    return None if "".join(done.stdout.split()) == "22" else f"{path} starts no ranks: {done.stderr[-300:]}"


_Call = Callable[[], object]
_Way = Callable[[Any, Place, Any, Any], _Call]


def _made(x: Tensor, elements: int, way: _Way, at: Place) -> Callable[[], Tensor]:
    """A call over numpy's views of a tensor and of a new one, which begins as a copy where it is as long."""
    out = x.clone() if elements == x.numel() else x.new_empty(elements)
    mpi: Any = importlib.import_module("mpi4py.MPI")
    move = way(mpi, at, [x.numpy(), mpi.FLOAT], [out.numpy(), mpi.FLOAT])

    def call() -> Tensor:
        move()
        return out

    return call


def _pair(forward: _Way, backward: _Way) -> Maker:
    def make(at: Place) -> Calls:
        before, after = at.task.before, at.task.after
        return in_turn(_made(at.x, after, forward, at), _made(at.cotangent, before, backward, at))

    return make


def _gather(_: Any, at: Place, x: Any, out: Any) -> _Call:
    return lambda: at.group.Allgather(x, out)


def _scatter(_: Any, at: Place, x: Any, out: Any) -> _Call:
    return lambda: at.group.Reduce_scatter_block(x, out)


def _all_reduce(mpi: Any, at: Place, _: Any, out: Any) -> _Call:
    return lambda: at.group.Allreduce(mpi.IN_PLACE, out)


def _all_to_all(_: Any, at: Place, x: Any, out: Any) -> _Call:
    return lambda: at.group.Alltoall(x, out)


def _broadcast(_: Any, at: Place, __: Any, out: Any) -> _Call:
    return lambda: at.group.Bcast(out, ROOT)


def _reduce(mpi: Any, at: Place, x: Any, out: Any) -> _Call:
    if at.rank == ROOT:
        return lambda: at.group.Reduce(mpi.IN_PLACE, out, root=ROOT)
    return lambda: at.group.Reduce(x, None, root=ROOT)


def _shift(offset: int) -> _Way:
    def way(_: Any, at: Place, x: Any, out: Any) -> _Call:
        to, source = (at.rank + offset) % at.task.ranks, (at.rank - offset) % at.task.ranks
        return lambda: at.group.Sendrecv(x, to, recvbuf=out, source=source)

    return way


CALLS = {
    "all_gather": _pair(_gather, _scatter),
    "reduce_scatter": _pair(_scatter, _gather),
    "all_reduce": _pair(_all_reduce, _all_reduce),
    "all_to_all": _pair(_all_to_all, _all_to_all),
    "broadcast": _pair(_broadcast, _reduce),
    "shift": _pair(_shift(1), _shift(-1)),
}
