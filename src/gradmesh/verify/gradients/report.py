"""What a check of gradients found."""

from __future__ import annotations

from dataclasses import dataclass, field

from gradmesh.types import Type
from gradmesh.verify.gradients.findings import Diagnosis

__all__ = ["Entry", "GradcheckReport"]


@dataclass(frozen=True)
class Entry:
    """One comparison: a leaf's gradient, on one rank, against finite differences.

    Attributes:
        name: the leaf; "loss" where ranks' losses, or tangents of all leaves at once, were compared.
        type: what it is over the ranks.
        rank: whose gradient; None where the ranks' gradients only count together, as for a replicated leaf.
        mode: "gradient", "second gradient", "tangent" or "same on every rank".
        analytic: what autograd has, in the direction in which the two differ most.
        numeric: what finite differences have there.
        tolerance: what they may differ by there.
        missing: whether autograd left no gradient at all.
        blurred: whether rounding of the losses hides more than a hundredth of what is compared.
        unclear: whether that is so at every step that was tried, so that nobody can tell whether it is right.
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
        """What they differ by."""
        return abs(self.analytic - self.numeric)

    @property
    def ok(self) -> bool:
        """Whether that is rounding, and rounding does not hide the gradient."""
        return self.error <= self.tolerance and not self.unclear

    def __str__(self) -> str:
        where = "all ranks" if self.rank is None else f"rank {self.rank}"
        kind = "" if self.type is None else f" {self.type}"
        if self.unclear:
            size = max(abs(self.analytic), abs(self.numeric))
            few = f"the loss has too few digits, {self.tolerance:.3g} is lost of {size:.3g}"
            return f"{self.mode} of {self.name}{kind} on {where}: cannot tell: {few}"
        got = "none" if self.missing else f"{self.analytic:.9g}"
        return f"{self.mode} of {self.name}{kind} on {where}: expected {self.numeric:.9g}, got {got}"


@dataclass
class GradcheckReport:
    """The result of `gradcheck`; true if all is right.

    Attributes:
        world_size: the number of ranks.
        objective: how the losses were made one number.
        losses: what the ranks' functions returned.
        entries: every comparison.
        diagnosis: why it failed; None where it did not, or nobody looked.
        seconds: what the check took.
    """

    world_size: int
    objective: str
    losses: list[float]
    entries: list[Entry] = field(default_factory=list)
    diagnosis: Diagnosis | None = None
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether every comparison holds."""
        return all(entry.ok for entry in self.entries)

    def __bool__(self) -> bool:
        return self.ok

    @property
    def failed(self) -> list[Entry]:
        """The comparisons that do not hold."""
        return [entry for entry in self.entries if not entry.ok]

    def __str__(self) -> str:
        head = f"gradcheck on {self.world_size} ranks, objective {self.objective!r}: "
        if self.ok:
            return head + f"all {len(self.entries)} gradients are right"
        failed = self.failed
        wrong = any(not entry.unclear for entry in failed)
        lines = [
            head
            + f"{len(failed)} of {len(self.entries)} gradients {'are wrong' if wrong else 'cannot be told'}"
        ]
        failed = sorted(failed, key=lambda entry: entry.unclear)
        lines += [f"  {entry}" for entry in failed[:_SHOWN]]
        if len(failed) > _SHOWN:
            lines.append(f"  and {len(failed) - _SHOWN} more")
        if self.diagnosis is not None:
            lines.append(str(self.diagnosis))
        return "\n".join(lines)


_SHOWN = 8
