"""What a comparison of several ranks with one process found."""

from __future__ import annotations

from dataclasses import dataclass, field

from gradmesh.verify.gradients.findings import Diagnosis

__all__ = ["Deviation", "SingleReport"]


@dataclass(frozen=True)
class Deviation:
    """What is not the same.

    Attributes:
        step: in which step, from 0.
        kind: "loss", "value", "gradient", or "parameter" (after the step).
        name: of the value, input or parameter.
        rank: on which rank; None: what the ranks have together.
        error: the largest difference of an element.
        expected: the size of the largest element on the single process.
        shapes: the shape there is, and the one that is expected, where they differ.
    """

    step: int
    kind: str
    name: str
    rank: int | None
    error: float
    expected: float
    shapes: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    def __str__(self) -> str:
        where = "all ranks together" if self.rank is None else f"rank {self.rank}"
        if self.shapes is not None:
            got, expected = map(list, self.shapes)
            return (
                f"step {self.step}: {self.kind} {self.name} on {where} has shape {got}, expected {expected}"
            )
        off = f"off by {self.error:.3g}, of {self.expected:.3g}"
        return f"step {self.step}: {self.kind} {self.name} on {where} is {off}"


@dataclass
class SingleReport:
    """The result of `same_as_single`; true if all is the same.

    Attributes:
        world_size: the number of ranks.
        compared: how many tensors and losses were compared.
        deviations: what is not the same, in the order in which it came about.
        diagnosis: why gradients of the first step that has wrong ones are.
    """

    world_size: int
    compared: int = 0
    deviations: list[Deviation] = field(default_factory=list)
    diagnosis: Diagnosis | None = None

    @property
    def ok(self) -> bool:
        """Whether all is the same."""
        return not self.deviations

    def __bool__(self) -> bool:
        return self.ok

    @property
    def first(self) -> list[Deviation]:
        """What came first: the deviations of the first step that has any, of the first kind there."""
        return [
            each
            for each in self.deviations
            if (each.step, each.kind) == (self.deviations[0].step, self.deviations[0].kind)
        ]

    def __str__(self) -> str:
        head = f"same_as_single on {self.world_size} ranks: "
        if self.ok:
            return head + f"all {self.compared} losses, values, gradients and parameters are the same"
        lines = [head + f"{len(self.deviations)} of {self.compared} are not the same, of which the first"]
        lines += [f"  {each}" for each in self.first]
        return "\n".join(lines + ([] if self.diagnosis is None else [str(self.diagnosis)]))
