"""What the job can be asked; nothing of torch or of an extra is imported here."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Job"]


@dataclass(frozen=True)
class Job:
    """What the command line can choose.

    Attributes:
        dp: ranks that have other sequences.
        sp: ranks of a sequence.
        tp: ranks of a layer.
        backend: what they run on.
        steps: of training.
        seed: of the values and of the batches.
    """

    dp: int = 2
    sp: int = 2
    tp: int = 2
    backend: str = "threads"
    steps: int = 60
    seed: int = 0

    @property
    def ranks(self) -> int:
        """How many there are."""
        return self.dp * self.sp * self.tp
