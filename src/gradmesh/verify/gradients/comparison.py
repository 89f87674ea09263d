"""One step of training on several ranks, compared with the same step on one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradmesh.types import Type
from gradmesh.verify.gradients.inputs import Input
from gradmesh.verify.gradients.placements import Placement, Shard, chosen, part_of
from gradmesh.verify.gradients.program import Objective
from gradmesh.verify.gradients.single_report import Deviation, SingleReport
from gradmesh.verify.gradients.training import Step

__all__ = ["Comparison", "compared_inputs"]


@dataclass
class Comparison:
    """Adds to a report what is not the same.

    Attributes:
        report: the report.
        parameters: how parameters lie on the ranks.
        outputs: how values do.
        objective: how the losses make one.
        rtol: what an element may be off by, relative to the largest of its tensor.
        atol: the same, absolutely.
        whole: the parameters of which every rank shows the whole.
    """

    report: SingleReport
    parameters: Mapping[str, Placement]
    outputs: Mapping[str, Placement]
    objective: Objective
    rtol: float
    atol: float
    whole: frozenset[str] = frozenset()

    def step(self, number: int, single: Step, ranks: list[Step], given: Sequence[object]) -> None:
        """Compare one step.

        Args:
            number: which.
            single: that of the single process.
            ranks: that of each rank.
            given: the whole inputs.
        """
        self._losses(number, single, ranks)
        for name, value in single.values.items():
            placement = chosen(self.outputs, name, Type.I)
            self._tensors(number, "value", name, value, [rank.values.get(name) for rank in ranks], placement)
        for name, placement in compared_inputs(given).items():
            found = [rank.input_gradients.get(name) for rank in ranks]
            self._tensors(number, "gradient", name, single.input_gradients[name], found, placement)
        for kind in ("gradient", "parameter"):
            for name, parameter in single.parameters.items():
                expected = single.gradients[name] if kind == "gradient" else parameter
                found = [
                    (rank.gradients if kind == "gradient" else rank.parameters).get(name) for rank in ranks
                ]
                placement = Type.I if name in self.whole else chosen(self.parameters, name, Type.I)
                # The shares of a replicated parameter are summed already.
                self._tensors(
                    number, kind, name, expected, found, Type.I if placement is Type.R else placement
                )

    def _losses(self, number: int, single: Step, ranks: list[Step]) -> None:
        losses = [torch.tensor(rank.loss, dtype=torch.float64) for rank in ranks]
        expected = torch.tensor(single.loss, dtype=torch.float64)
        if self.objective == "mean":
            losses = [loss / len(ranks) for loss in losses]
        self._tensors(
            number,
            "loss",
            "loss",
            expected,
            list(losses),
            Type.I if self.objective == "replicated" else Type.R,
        )

    def _tensors(
        self,
        number: int,
        kind: str,
        name: str,
        expected: Tensor | None,
        found: list[Tensor | None],
        placement: Placement,
    ) -> None:
        """Compare what each rank has, or what they have together, with its part of the single process's."""
        if expected is None and all(each is None for each in found):
            return
        if placement is Type.R:
            there = [each for each in found if each is not None]
            total = torch.stack(there).sum(0) if there else None
            self._pair(number, kind, name, None, expected, total)
            return
        for rank, each in enumerate(found):
            part = None if expected is None else part_of(expected, placement, rank, len(found))
            self._pair(number, kind, name, rank, part, each)

    def _pair(
        self,
        number: int,
        kind: str,
        name: str,
        rank: int | None,
        expected: Tensor | None,
        found: Tensor | None,
    ) -> None:
        self.report.compared += 1
        either = expected if expected is not None else found
        if either is None or (either.numel() == 0 and (found is None or found.shape == either.shape)):
            return
        expected = torch.zeros_like(either) if expected is None else expected
        size = float(expected.abs().max()) if expected.numel() else 0.0
        got = torch.zeros_like(either) if found is None else found
        alike = got.shape == expected.shape
        error = float((got - expected).abs().max()) if alike else float("inf")
        if not error <= self.atol + self.rtol * size:
            shapes = None if alike else (tuple(got.shape), tuple(expected.shape))
            self.report.deviations.append(Deviation(number, kind, name, rank, error, size, shapes))


def compared_inputs(given: Sequence[object]) -> dict[str, Placement]:
    """The inputs whose gradients are compared, by name, and how they lie."""
    result: dict[str, Placement] = {}
    for i, x in enumerate(given if isinstance(given, tuple | list) else (given,)):
        if isinstance(x, Shard) and not x.constant:
            result[f"inputs[{i}]"] = x
        elif isinstance(x, Input) and isinstance(x.type, Type):
            result[f"inputs[{i}]"] = x.type
    return {name: place for name, place in result.items() if _differentiable(given, name)}


def _differentiable(given: Sequence[object], name: str) -> bool:
    x = given[int(name[len("inputs[") : -1])] if isinstance(given, tuple | list) else given
    value = x.value if isinstance(x, Shard | Input) else x
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
