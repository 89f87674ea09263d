"""The result of `gradcheck`."""

from __future__ import annotations

from dataclasses import dataclass, field

from gradmesh.types import Type
from gradmesh.verify.gradients.findings import Diagnosis

__all__ = ["Entry", "GradcheckReport"]


@dataclass(frozen=True)
class Entry:
    """One comparison of a leaf's gradient with finite differences.

    Attributes:
        name: the leaf; "loss" for comparisons of the ranks' losses, or of tangents of all leaves at once.
        type: its type over the ranks.
        rank: the rank of the gradient; None for the sum over ranks, as for a replicated leaf.
        mode: "gradient", "second gradient", "tangent" or "same on every rank".
        analytic: the value from autograd, in the direction of the largest difference.
        numeric: the value from finite differences in that direction.
        tolerance: the allowed difference.
        missing: whether the gradient is None.
        blurred: whether the rounding of the losses exceeds 1% of the compared values.
        unclear: whether it does so for every step size, so that the comparison is undecidable.
    """

    name: str
    type: Type | None
    rank: int | None
    mode: str
    analytic: float
    numeric: float
    tolerance: float
    missing: bool = False
    blurred: bool = False
    unclear: bool = False

    @property
    def error(self) -> float:
        """The absolute difference."""
        return abs(self.analytic - self.numeric)

    @property
    def ok(self) -> bool:
        """Whether the difference is within the tolerance, and the comparison is decidable."""
        return self.error <= self.tolerance and not self.unclear

    def __str__(self) -> str:
        where = "all ranks" if self.rank is None else f"rank {self.rank}"
        kind = "" if self.type is None else f" {self.type}"
        if self.unclear:
            size = max(abs(self.analytic), abs(self.numeric))
            few = f"the loss has too few digits: rounding error {self.tolerance:.3g}, gradient {size:.3g}"
            return f"{self.mode} of {self.name}{kind} on {where}: undecidable: {few}"
        got = "none" if self.missing else f"{self.analytic:.9g}"
        return f"{self.mode} of {self.name}{kind} on {where}: expected {self.numeric:.9g}, got {got}"


@dataclass
class GradcheckReport:
    """The result of `gradcheck`; true if all gradients are correct.

    Attributes:
        world_size: the number of ranks.
        objective: how the losses were combined.
        losses: the ranks' losses.
        entries: all comparisons.
        diagnosis: the cause of a failure; None if it passed, or with `diagnose=False`.
        seconds: the duration of the check.
    """

    world_size: int
    objective: str
    losses: list[float]
    entries: list[Entry] = field(default_factory=list)
    diagnosis: Diagnosis | None = None
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether every comparison passed."""
        return all(entry.ok for entry in self.entries)

    def __bool__(self) -> bool:
        return self.ok

    @property
    def failed(self) -> list[Entry]:
        """The comparisons that failed."""
        return [entry for entry in self.entries if not entry.ok]

    def __str__(self) -> str:
        head = f"gradcheck on {self.world_size} ranks, objective {self.objective!r}: "
        if self.ok:
            return head + f"all {len(self.entries)} gradients are right"
        failed = self.failed
        wrong = any(not entry.unclear for entry in failed)
        lines = [
            head
            + f"{len(failed)} of {len(self.entries)} gradients {'are wrong' if wrong else 'are undecidable'}"
        ]
        failed = sorted(failed, key=lambda entry: entry.unclear)
        lines += [f"  {entry}" for entry in failed[:_SHOWN]]
        if len(failed) > _SHOWN:
            lines.append(f"  and {len(failed) - _SHOWN} more")
        if self.diagnosis is not None:
            lines.append(str(self.diagnosis))
        return "\n".join(lines)


_SHOWN = 8
