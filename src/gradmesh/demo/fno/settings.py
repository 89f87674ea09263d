"""Options of the job; imports neither torch nor an extra."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Job"]


@dataclass(frozen=True)
class Job:
    """Options of the command line.

    Attributes:
        ranks: number of ranks over which a field is sharded.
        backend: of the ranks.
        epochs: passes over the training solutions.
        points: grid points; need not be divisible by the number of ranks.
        samples: number of training solutions.
        held_out: number of test solutions.
        batch: solutions per step.
        width: channels of the network.
        modes: kept by its spectral layers.
        layers: number of layers.
        seed: of the solutions, the initial parameters and the order.
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
