"""Compares each rank's measured gradients with the finite differences of the objective."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradmesh.types import Type
from gradmesh.verify.gradients.measure import Measured, Move, Options
from gradmesh.verify.gradients.program import Part, inner
from gradmesh.verify.gradients.report import Entry

__all__ = ["Slopes", "entries", "slopes"]

_ROUNDING = 20 * 2.2e-16
"""The assumed relative error of a loss, since its last digits accumulate many rounding errors."""


@dataclass(frozen=True)
class Slopes:
    """The finite differences of one perturbation, and the gradients along it.

    Attributes:
        move: the perturbation.
        by_rank: for each rank and direction, the derivative of that rank's part of the objective.
        total: for each direction, the derivative of the objective.
        analytic: for each rank and direction, that rank's gradient; zero if it has none.
        missing: the ranks that have the leaf but no gradient.
        noise: the rounding error of the finite differences.
    """

    move: Move
    by_rank: Tensor
    total: Tensor
    analytic: Tensor
    missing: frozenset[int]
    noise: float

    @property
    def holders(self) -> list[int]:
        """The ranks whose gradients are compared."""
        return list(range(len(self.by_rank))) if self.move.owner is None else [self.move.owner]


def slopes(found: list[Measured], options: Options, order: int = 1) -> list[Slopes]:
    """The finite differences and gradients for all perturbations."""
    result = []
    for at, move in enumerate(found[0].moves):
        ends = [rank.parts[order][at] for rank in found]
        step = 2 * options.eps
        by_rank = torch.tensor([[_slope(pair, step) for pair in rank] for rank in ends], dtype=torch.float64)
        by_rank = by_rank.view(len(found), move.count)
        totals = [
            (Part.total([rank[n][1] for rank in ends]) - Part.total([rank[n][0] for rank in ends])) / step
            for n in range(move.count)
        ]
        size = sum(abs(p.varying) + abs(p.invariant) for rank in ends for pair in rank for p in pair)
        noise = _ROUNDING * size / max(1, 2 * move.count) / options.eps
        gradients = [rank.gradients[order].get(move.name) for rank in found]
        analytic = torch.stack([_along(grad, move, options, rank) for rank, grad in enumerate(gradients)])
        holders = range(len(found)) if move.owner is None else [move.owner]
        missing = frozenset(rank for rank in holders if gradients[rank] is None)
        total = torch.tensor(totals, dtype=torch.float64)
        result.append(Slopes(move, by_rank, total, analytic, missing, noise))
    return result


def entries(found: list[Measured], options: Options) -> list[Entry]:
    """Every comparison of a check."""
    result = _losses(found, options)
    for order in range(1, options.order + 1):
        mode = "gradient" if order == 1 else "second gradient"
        for slope in slopes(found, options, order):
            if slope.move.type is Type.R:
                together = slope.analytic.sum(0)
                result.append(_entry(slope, mode, None, together, options))
            else:
                result += [_entry(slope, mode, rank, slope.analytic[rank], options) for rank in slope.holders]
    return result + _tangents(found, options)


def _slope(pair: tuple[Part, Part], step: float) -> float:
    before, after = pair
    return ((after.varying - before.varying) + (after.invariant - before.invariant)) / step


def _along(grad: Tensor | None, move: Move, options: Options, rank: int) -> Tensor:
    """A gradient along each direction of a perturbation; zero on a rank that is not perturbed."""
    if grad is None or move.owner not in (None, rank) or grad.shape != move.shape:
        return torch.zeros(move.count, dtype=torch.float64)
    if move.count == 0:
        return torch.zeros(0, dtype=torch.float64)
    return torch.stack([inner(grad, move.along(n, options.seed)).double() for n in range(move.count)])


def _entry(slope: Slopes, mode: str, rank: int | None, analytic: Tensor, options: Options) -> Entry:
    missing = bool(slope.missing) if rank is None else rank in slope.missing
    kind = slope.move.type
    if slope.move.count == 0:
        return Entry(slope.move.name, kind, rank, mode, 0.0, 0.0, 0.0)
    allowed = tolerance(slope, options)
    errors = (analytic - slope.total).abs() - allowed
    errors[errors.isnan()] = float("inf")
    worst = int(errors.argmax())
    return Entry(
        slope.move.name,
        kind,
        rank,
        mode,
        float(analytic[worst]),
        float(slope.total[worst]),
        float(allowed[worst]),
        missing,
        _blurred(slope.noise, float(allowed[worst]), torch.cat([analytic, slope.total])),
    )


def _blurred(noise: float, allowed: float, values: Tensor) -> bool:
    """Whether rounding dominates the tolerance and exceeds 1% of the values."""
    size = float(values.abs().max())
    return size > 0 and noise > max(allowed - noise, 1e-2 * size)


def tolerance(slope: Slopes, options: Options) -> Tensor:
    """The allowed difference between a gradient and a finite difference, along each direction.

    The truncation error of a central difference is eps^2 / 6 times the third derivative (1e-13 of it by default) and is
    covered by `rtol` times the terms of the sum; the rounding error of the losses is divided by eps.
    """
    terms = slope.by_rank.abs().sum(0) + slope.total.abs()
    return options.atol + slope.noise + options.rtol * terms


def _losses(found: list[Measured], options: Options) -> list[Entry]:
    """For a replicated objective: whether the losses are equal on every rank, at every evaluated point."""
    if options.objective != "replicated":
        return []
    first = [part for move in found[0].parts[1] for pair in move for part in pair]
    result = []
    for rank in found[1:]:
        others = [part for move in rank.parts[1] for pair in move for part in pair]
        pairs = [(rank.loss, found[0].loss)] + [
            (a.invariant, b.invariant) for a, b in zip(others, first, strict=True)
        ]
        got, expected = max(pairs, key=lambda pair: abs(pair[0] - pair[1]))
        allowed = options.atol + options.rtol * abs(expected)
        result.append(Entry("loss", Type.I, rank.rank, "same on every rank", got, expected, allowed))
    return result


def _tangents(found: list[Measured], options: Options) -> list[Entry]:
    result = []
    for n in range(len(found[0].tangents)):
        for rank in found:
            tangent, before, after = rank.tangents[n]
            numeric = _slope((before, after), 2 * options.eps)
            analytic = tangent.varying + tangent.invariant
            size = sum(abs(p.varying) + abs(p.invariant) for p in (before, after))
            noise = _ROUNDING * size / options.eps
            allowed = options.atol + noise + options.rtol * abs(numeric)
            blurred = _blurred(noise, allowed, torch.tensor([analytic, numeric]))
            result.append(
                Entry("loss", None, rank.rank, "tangent", analytic, numeric, allowed, blurred=blurred)
            )
    return result
