"""What the job can be asked, and who is told how far it is; nothing of an extra is imported here."""

from __future__ import annotations

from dataclasses import dataclass, field

from gradmesh.backends import shm

__all__ = ["Settings", "Watcher"]


@dataclass(frozen=True)
class Settings:
    """What the command line can choose.

    Attributes:
        ranks: how many there are.
        backend: what they run on.
        steps: of training.
        md: steps of molecular dynamics.
        channels: how many scalars, and how many vectors, each atom has.
        structures: how many are trained on; a third as many are held out.
        batch: how many a step is of.
        partition: "space": every structure is cut; "graphs": each is whole on one rank.
        moving: about how many atoms the slab has that moves.
        atoms: about how many the largest slab has, of which the rows are counted.
        seed: decides the structures, the initial parameters and the velocities.
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
    """Is told how far the job is; this one ignores it."""

    def begin(self, what: str, steps: int) -> None:
        """A part of the job begins, of so many steps."""

    def advance(self, steps: int, what: str = "") -> None:
        """So many steps of it are done; what is to be said of them."""
