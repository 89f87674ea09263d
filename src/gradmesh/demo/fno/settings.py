"""What the job can be asked; nothing of torch or of an extra is imported here."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Job"]


@dataclass(frozen=True)
class Job:
    """What the command line can choose.

    Attributes:
        ranks: over which a field is cut.
        backend: what they run on.
        epochs: passes over the solutions.
        points: of a field; the ranks need not divide them.
        samples: solutions to train on.
        held_out: solutions to test on.
        batch: solutions in a step.
        width: channels of the network.
        modes: kept by its spectral layers.
        layers: how many of these it has.
        seed: of the solutions, the parameters and the order.
    """

    ranks: int = 4
    backend: str = "threads"
    epochs: int = 30
    points: int = 126
    samples: int = 96
    held_out: int = 32
    batch: int = 16
    width: int = 12
    modes: int = 12
    layers: int = 3
    seed: int = 0
