"""Who is timed: each system on each backend that it is measured on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from benchmarks.speed import mpi
from benchmarks.speed.calls import Maker, of_system
from benchmarks.speed.floor import FLOOR
from benchmarks.speed.raw import RAW
from benchmarks.systems.ours import GRADMESH
from benchmarks.systems.peers import DTENSOR, FUNCTIONAL, NN, SPMD_TYPES
from benchmarks.systems.system import System

__all__ = ["CONTENDERS", "FLOOR_NAME", "SYSTEMS", "Contender", "absent", "chosen", "named"]

FLOOR_NAME = "floor"


@dataclass(frozen=True)
class Contender:
    """A system on a backend.

    Attributes:
        system: its name.
        backend: "gloo", "shm", "threads", "mpi4py" (torch's calls over MPI) or "MPI"; "" for
            the lower bound, which does not communicate.
        makers: how it does each verb that it has.
        needs: a module without which it is left out, and the command that installs it.
    """

    system: str
    backend: str
    makers: Mapping[str, Maker]
    needs: tuple[str, str] | None = None

    @property
    def name(self) -> str:
        """As the tables show it."""
        return named(self.system, self.backend)


def named(system: str, backend: str) -> str:
    """The name of a system on a backend."""
    return f"{system} ({backend})" if backend not in ("", system) else system


def _on(system: System, *backends: str) -> list[Contender]:
    return [Contender(system.name, backend, of_system(system), system.needs) for backend in backends]


_ALL = (
    Contender(FLOOR_NAME, "", FLOOR),
    *_on(GRADMESH, "shm", "gloo", "threads", "mpi4py"),
    *(Contender("torch.distributed", backend, RAW) for backend in ("shm", "gloo", "threads", "mpi4py")),
    *_on(NN, "gloo"),
    *_on(FUNCTIONAL, "gloo", "shm"),
    *_on(SPMD_TYPES, "gloo"),
    *_on(DTENSOR, "gloo"),
    Contender("MPI", "MPI", mpi.CALLS),
)

CONTENDERS = {contender.name: contender for contender in _ALL}
SYSTEMS = tuple(dict.fromkeys(contender.system for contender in _ALL))


def absent(contender: Contender) -> str | None:
    """Why the contender cannot be measured here, as far as one sees before the ranks are started."""
    if contender.needs is not None and find_spec(contender.needs[0]) is None:
        return f"no {contender.needs[0]}: {contender.needs[1]}"
    return mpi.absent() if contender.backend in ("MPI", "mpi4py") else None


def chosen(systems: Sequence[str]) -> list[Contender]:
    """The contenders of these systems, all if there are none, and always the floor."""
    wanted: Iterable[str] = {*systems, FLOOR_NAME} if systems else SYSTEMS
    return [contender for contender in _ALL if contender.system in wanted]
