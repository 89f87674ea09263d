"""Options of the job; imports neither torch nor an extra."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Job"]


@dataclass(frozen=True)
class Job:
    """Options of the command line.

    Attributes:
        dp: data parallel size.
        sp: sequence parallel size.
        tp: tensor parallel size.
        backend: of the ranks.
        steps: number of training steps.
        seed: of the initial parameters and the batches.
    """

    dp: int = 2
    sp: int = 2
    tp: int = 2
    backend: str = "threads"
    steps: int = 60
    seed: int = 0

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.dp * self.sp * self.tp
