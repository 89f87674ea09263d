"""Options and progress callbacks of the job; imports no extra."""

from __future__ import annotations

from dataclasses import dataclass, field

from gradmesh.backends import shm

__all__ = ["Settings", "Watcher"]


@dataclass(frozen=True)
class Settings:
    """Options of the command line.

    Attributes:
        ranks: number of ranks.
        backend: of the ranks.
        steps: number of training steps.
        md: number of steps of molecular dynamics.
        channels: scalar features, and vector features, of each atom.
        structures: number of training structures; a third as many are held out.
        batch: structures per step.
        partition: "space": each structure is partitioned; "graphs": each is on one rank.
        moving: approximate number of atoms in the molecular dynamics.
        atoms: approximate number of atoms of the largest slab whose sent rows are counted.
        seed: of the structures, the initial parameters and the velocities.
    """

    ranks: int = 4
    backend: str = field(default_factory=shm.default)
    steps: int = 100
    md: int = 100
    channels: int = 8
    structures: int = 48
    batch: int = 8
    partition: str = "space"
    moving: int = 97
    atoms: int = 8000
    seed: int = 0


class Watcher:
    """Progress callbacks; this base class ignores them."""

    def begin(self, what: str, steps: int) -> None:
        """A part of the job starts, with a number of steps."""

    def advance(self, steps: int, what: str = "") -> None:
        """Some steps are done; `what` is shown."""
