"""What a wrapper adds: the verb against the raw call on the same backend, at the smallest message."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from benchmarks.speed.contenders import named
from benchmarks.speed.results import Key, Results
from benchmarks.systems.ours import GRADMESH
from benchmarks.systems.peers import FUNCTIONAL

__all__ = ["WRAPPERS", "Overhead", "overheads"]

WRAPPERS = (GRADMESH.name, FUNCTIONAL.name)


@dataclass(frozen=True)
class Overhead:
    """A wrapper against the raw call.

    Attributes:
        key: which cell.
        backend: of both.
        wrapper: the system's name.
        seconds: the median over the rounds of what the wrapper took longer in the same round.
        ratio: its median over that of the raw call.
    """

    key: Key
    backend: str
    wrapper: str
    seconds: float
    ratio: float


def overheads(results: Results) -> list[Overhead]:
    """What each wrapper adds, on each backend where the raw call was timed too."""
    found = []
    for key in results.keys(sizes=results.sizes[:1]):
        for backend in ("shm", "gloo", "threads"):
            raw = results.table.get((key, named("torch.distributed", backend)))
            for wrapper in WRAPPERS:
                cell = results.table.get((key, named(wrapper, backend)))
                if raw is not None and cell is not None:
                    more = median(a - b for a, b in zip(cell.times, raw.times, strict=True))
                    found.append(Overhead(key, backend, wrapper, more, cell.median / raw.median))
    return found
