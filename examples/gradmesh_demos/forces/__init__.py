"""`gradmesh demo forces`: graph parallelism for an interatomic potential, compared with one process.

`structures` makes the data with ASE and their graphs, `layers` the parts of the network. `single` is the potential for
one process and `parallel` for ranks; docs/forces.md shows the difference. `training` and `dynamics` run it, and `job`
runs everything, compares both and shows the results.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradmesh._util.environment import require
from gradmesh.backends import shm
from gradmesh_demos.runner import BACKEND, RANKS, SEED, Watcher, option

NEEDS = PICTURE = "forces"
SHORT = "Graph parallelism: an interatomic potential, with molecular dynamics."
HELP = (
    "Train an interatomic potential on slabs, alloys, particles and strained crystals of ASE's EMT, each partitioned "
    "over the ranks, and compare with one process; predict forces of held-out structures; count the rows that are "
    "sent; and run molecular dynamics on all ranks."
)
WRITE = "Write the structures with energies, forces and stresses as extended XYZ, and exit."


@dataclass(frozen=True)
class Job:
    """Options of the command line."""

    ranks: int = option(4, RANKS, 1)
    backend: str = option(shm.default, BACKEND)
    steps: int = option(100, "Number of training steps.", 1)
    md: int = option(100, "Number of steps of molecular dynamics.", 1)
    channels: int = option(8, "Scalar features, and vector features, of each atom.", 1)
    structures: int = option(48, "Number of training structures.", 4)
    batch: int = option(8, "Structures per step.", 1)
    moving: int = option(97, "Atoms in the molecular dynamics.", 24)
    atoms: int = option(8000, "Atoms of the largest slab whose sent rows are counted.", 256)
    partition: str = option(
        "space",
        "space: partition each structure; graphs: assign each structure to one rank.",
        choices=("space", "graphs"),
    )
    seed: int = option(0, SEED, 0)


def introduction(job: Job) -> str:
    """What the demo does."""
    how = "each is partitioned" if job.partition == "space" else "each is on one rank"
    return (
        f"Interatomic potential, trained on energies, forces and stresses of ASE's EMT, on {job.ranks} ranks "
        f"({job.backend}): {job.structures} structures in batches of {job.batch}; {how}."
    )


def run(job: Job, watcher: Watcher | None = None) -> Any:
    """Run the job; see `job.run`."""
    require(NEEDS, "demo forces")
    return _module("job").run(job, watcher)


def write(path: Path, job: Job) -> None:
    """Write the training structures."""
    _module("structures").write(path, job.structures, job.seed)


def print_tables(result: Any, console: Any) -> None:
    """Print the results."""
    _module("job").print_tables(result, console)


def draw(result: Any) -> Any:
    """Plot the results."""
    return _module("job").draw(result)


def _module(name: str) -> Any:
    """A module that needs the extra."""
    return importlib.import_module(f"{__name__}.{name}")
