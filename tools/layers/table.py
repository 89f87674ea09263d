"""All layers, and the figures of each as a row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gradmesh as gm
from tools.layers import case as measures
from tools.layers import fields, losses, own
from tools.layers.case import Case

CASES: dict[str, Case] = {case.name: case for case in [*losses.CASES, *own.CASES, *fields.CASES]}

CLOSE = 1e-10

EVEN, UNEVEN, EMPTY = ((4,), (2, 2)), ((3, 1), (3, 1, 2)), ((0, 4), (0, 5, 0))
"""Sizes that are cut: how much each rank has."""

HEAD = "layer | types | value | first | second | uneven | empty | compiled | MB 1 | MB 2 | MB 4 | audit"

Run = Callable[..., list[Any]]


@dataclass(frozen=True)
class Row:
    """What is found of a layer."""

    case: Case  # the layer
    even: list[float]  # how far value, slopes and second slopes are off where all ranks have as much
    uneven: float  # the largest of them where they have not
    empty: float  # the same where ranks have nothing
    # how far the gradients of the compiled layer are from its own, or None where that is not measured
    compiled: float | None
    megabytes: dict[int, float]  # of a rank, by the number of ranks
    findings: list[str]  # the audit's

    @property
    def right(self) -> bool:
        """Whether everything that is to be small is."""
        far = [*self.even, self.uneven, self.empty, self.compiled or 0.0]
        return not self.findings and all(value <= CLOSE for value in far)

    def cells(self) -> list[str]:
        """The row as text."""
        far = [*self.even, self.uneven, self.empty]
        small = "" if self.compiled is None else f"{self.compiled:.0e}"
        small = small if self.case.compiles else "eager only"
        weights = [f"{self.megabytes[n]:.0f}" if n in self.megabytes else "" for n in (1, 2, 4)]
        found = ", ".join(self.findings) or "none"
        return [
            f"`{self.case.name}`",
            self.case.types,
            *(f"{value:.0e}" for value in far),
            small,
            *weights,
            found,
        ]


def _deviations(name: str, sizes: tuple[int, ...]) -> list[float]:
    return measures.deviations(CASES[name], sizes)


def _compiled(name: str, sizes: tuple[int, ...]) -> float:
    return measures.compiled(CASES[name], sizes)


def _megabytes(name: str) -> float:
    return measures.megabytes(CASES[name])


def row_of(case: Case, processes: dict[int, Run], *, weigh: bool = True) -> Row:
    """Measure a layer."""

    def worst(cuts: tuple[tuple[int, ...], ...]) -> list[float]:
        found = [
            each
            for sizes in cuts
            for each in gm.launch(_deviations, len(sizes), backend="threads", args=(case.name, sizes))
        ]
        return [max(values) for values in zip(*found, strict=True)]

    compiles = max(processes[2](_compiled, case.name, (2, 2))) if case.compiles and 2 in processes else None
    weights = {n: max(run(_megabytes, case.name)) for n, run in processes.items()} if weigh else {}
    return Row(
        case,
        worst(EVEN),
        max(worst(UNEVEN)),
        max(worst(EMPTY)),
        compiles,
        weights,
        measures.findings(case, 2),
    )
