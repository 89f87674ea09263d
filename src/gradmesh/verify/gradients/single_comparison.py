"""Compares one training step on several ranks with the same step on a single process."""

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
    """Adds deviations to a report.

    Attributes:
        report: the report.
        parameters: the placement of parameters on the ranks.
        outputs: the placement of returned values.
        objective: how the losses are combined.
        rtol: the tolerance of an element relative to the largest of its tensor.
        atol: the absolute tolerance.
        whole: the parameters that are available in full on every rank.
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
            number: its index.
            single: the step of the single process.
            ranks: the step of each rank.
            given: the full inputs.
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
                # Training already summed the ranks' contributions to a replicated parameter.
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
        """Compare each rank's tensor, or their sum, with the corresponding one of the single process."""
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
    """The placement, by name, of the inputs whose gradients are compared."""
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
