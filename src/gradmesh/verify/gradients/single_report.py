"""The result of `same_as_single`."""

from __future__ import annotations

from dataclasses import dataclass, field

from gradmesh.verify.gradients.findings import Diagnosis

__all__ = ["Deviation", "SingleReport"]


@dataclass(frozen=True)
class Deviation:
    """One tensor that differs from the single process.

    Attributes:
        step: the training step, from 0.
        kind: "loss", "value", "gradient", or "parameter" (after the step).
        name: the name of the value, input or parameter.
        rank: the rank; None: the sum over ranks.
        error: the largest difference of an element.
        expected: the largest absolute value on the single process.
        shapes: the actual and the expected shape, if they differ.
    """

    step: int
    kind: str
    name: str
    rank: int | None
    error: float
    expected: float
    shapes: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    def __str__(self) -> str:
        where = "all ranks (sum)" if self.rank is None else f"rank {self.rank}"
        if self.shapes is not None:
            got, expected = map(list, self.shapes)
            return (
                f"step {self.step}: {self.kind} {self.name} on {where} has shape {got}, expected {expected}"
            )
        off = f"max. error {self.error:.3g}, largest expected value {self.expected:.3g}"
        return f"step {self.step}: {self.kind} {self.name} on {where}: {off}"


@dataclass
class SingleReport:
    """The result of `same_as_single`; true if all results are the same.

    Attributes:
        world_size: the number of ranks.
        compared: the number of compared tensors and losses.
        deviations: the differences, in the order of occurrence.
        diagnosis: the cause of the deviations of the first step, if found.
    """

    world_size: int
    compared: int = 0
    deviations: list[Deviation] = field(default_factory=list)
    diagnosis: Diagnosis | None = None

    @property
    def ok(self) -> bool:
        """Whether there are no deviations."""
        return not self.deviations

    def __bool__(self) -> bool:
        return self.ok

    @property
    def first(self) -> list[Deviation]:
        """The first deviations: those of the first kind in the first step that deviates."""
        return [
            each
            for each in self.deviations
            if (each.step, each.kind) == (self.deviations[0].step, self.deviations[0].kind)
        ]

    def __str__(self) -> str:
        head = f"same_as_single on {self.world_size} ranks: "
        if self.ok:
            return head + f"all {self.compared} losses, values, gradients and parameters are the same"
        lines = [head + f"{len(self.deviations)} of {self.compared} differ; the first:"]
        lines += [f"  {each}" for each in self.first]
        return "\n".join(lines + ([] if self.diagnosis is None else [str(self.diagnosis)]))
