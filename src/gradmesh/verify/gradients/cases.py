"""The gradients to explain: one leaf on one rank, along several directions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradmesh.types import Type

__all__ = ["Case", "Cases", "Fit"]


@dataclass(frozen=True)
class Case:
    """A leaf on a rank.

    Attributes:
        name: the leaf.
        type: its type over the ranks.
        rank: the rank.
        got: its gradient along each direction.
        conjugate: the conjugate of its gradient along each direction; None for real leaves.
        want: the derivative of the objective along each direction.
        terms: the derivative of each rank's loss along each direction; None for a replicated objective.
        allowed: the tolerance, from rounding.
    """

    name: str
    type: Type
    rank: int
    got: Tensor
    conjugate: Tensor | None
    want: Tensor
    terms: Tensor | None
    allowed: Tensor

    def is_(self, predicted: Tensor, factor: float = 1.0) -> bool:
        """Whether the gradient equals a prediction."""
        return self._near(self.got, predicted, factor)

    @property
    def right(self) -> bool:
        """Whether the gradient is correct."""
        return self.is_(self.want)

    def _near(self, got: Tensor, predicted: Tensor, factor: float = 1.0) -> bool:
        return got.shape == predicted.shape and bool(
            ((got - predicted).abs() <= self.allowed * max(1.0, abs(factor))).all()
        )

    def conjugate_is_right(self) -> bool:
        """Whether the conjugate of the gradient is correct."""
        return self.conjugate is not None and self._near(self.conjugate, self.want)


@dataclass(frozen=True)
class Fit:
    """A hypothesis that fits, and its description for this program."""

    name: str
    text: str


class Cases:
    """All cases of the leaves with wrong gradients.

    Args:
        cases: all cases.
        ranks: the number of ranks.
        counts: the number of rows of each rank, if they differ.
    """

    def __init__(self, cases: Sequence[Case], ranks: int, counts: Sequence[int] | None) -> None:
        wrong = {case.name for case in cases if not case.right}
        self.all = [case for case in cases if case.name in wrong]
        self.bad = [case for case in self.all if not case.right]
        self.ranks, self.counts = ranks, counts
        self._of: dict[tuple[str, int], Case] = {(case.name, case.rank): case for case in self.all}

    def others(self, case: Case) -> list[Case]:
        """The cases of the same leaf on other ranks along the same directions."""
        return [
            other
            for other in self.all
            if other.name == case.name and other.rank != case.rank and other.want.shape == case.want.shape
        ]

    def solved(self, columns: Callable[[Case], list[Tensor] | None]) -> list[float] | None:
        """The factors for which the columns sum to the gradient in all cases; None if there are none."""
        rows, found = [], []
        for case in self.all:
            made = columns(case)
            if made is None:
                return None
            rows.append(torch.stack(made, 1) / case.allowed.unsqueeze(1))
            found.append(case.got / case.allowed)
        a, b = torch.cat(rows), torch.cat(found)
        if a.shape[0] <= a.shape[1]:
            return None
        scale = a.norm(dim=0)
        kept = scale > 1
        if not bool(kept.all()):
            return None
        solution = torch.linalg.lstsq(a / scale, b.unsqueeze(1), driver="gelsd").solution.squeeze(1) / scale
        if torch.linalg.matrix_rank(a / scale, rtol=1e-6) < a.shape[1]:
            return None
        close = (a @ solution - b).abs() <= max(1.0, float(solution.abs().max()))
        return [float(x) for x in solution] if bool(close.all()) else None
