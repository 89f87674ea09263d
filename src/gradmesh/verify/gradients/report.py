"""Compares the measured gradients with finite differences; the entries, the diagnosis and the report."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradmesh.errors import RankError
from gradmesh.types import Type
from gradmesh.verify.gradients.program import Measured, Move, Options, Part, inner

NONE_FITS = "none fits"
TOO_FEW_DIGITS = "the loss has too few digits"


@dataclass(frozen=True)
class Suspect:
    """A collective that may be at fault.

    Attributes:
        call: its name and call site.
        why: the evidence.
        fixes: whether changing only this collective makes every gradient correct.
    """

    call: str
    why: str
    fixes: bool = False

    def __str__(self) -> str:
        return f"{self.call}: {self.why}"


@dataclass
class Diagnosis:
    """Why gradients are wrong.

    Attributes:
        hypothesis: the name of the hypothesis that fits, or "none fits".
        text: its description for this program.
        names: the leaves whose gradients are wrong.
        ranks: the ranks on which they are wrong.
        suspects: the collectives that may be at fault, the most likely first.
        also: other hypotheses that fit as well.
    """

    hypothesis: str
    text: str
    names: list[str] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    suspects: list[Suspect] = field(default_factory=list)
    also: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"  diagnosis: {self.hypothesis}: {self.text}"]
        if self.names:
            lines.append(
                f"    gradients  {', '.join(self.names)}, on ranks {', '.join(map(str, self.ranks))}"
            )
        if self.also:
            lines.append(f"    or         {'; '.join(self.also)}")
        for i, suspect in enumerate(self.suspects[:3]):
            lines.append(f"    {'most likely' if i == 0 else 'or'} {suspect}")
        return "\n".join(lines)


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


_ROUNDING = 20 * 2.2e-16
"""The assumed relative error of a loss, since its last digits accumulate many rounding errors."""


@dataclass(frozen=True)
class Slopes:
    """The finite differences of one perturbation, and the gradients along it."""

    move: Move  # the perturbation
    by_rank: Tensor  # for each rank and direction, the derivative of that rank's part of the objective
    total: Tensor  # for each direction, the derivative of the objective
    analytic: Tensor  # for each rank and direction, that rank's gradient; zero if it has none
    missing: frozenset[int]  # the ranks that have the leaf but no gradient
    noise: float  # the rounding error of the finite differences

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
        analytic = torch.stack([along(grad, move, options, rank) for rank, grad in enumerate(gradients)])
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


def along(grad: Tensor | None, move: Move, options: Options, rank: int) -> Tensor:
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


_STEPS = (1e-4, 1e-3)
_ZERO = 1e-10
"""A gradient this much smaller than the largest one is zero up to rounding."""


def widest(options: Options) -> Options:
    """The options of a check with the largest step."""
    return dataclasses.replace(options, eps=max(_STEPS), wide=True)


def refined(
    every: list[Entry], measured: Callable[[Options], list[Measured]], options: Options
) -> list[Entry]:
    """Replace comparisons that are hidden by rounding by ones with larger steps.

    A gradient counts as wrong only if it is wrong for each larger step, since a large step may leave the range in which
    the loss is smooth. If rounding hides it at the largest step too, it is unclear.
    """
    if not any(entry.blurred and entry.ok for entry in every):
        return every
    steps = [dataclasses.replace(options, eps=eps, wide=True) for eps in _STEPS]
    try:
        found = [measured(step) for step in steps]
    except RankError:  # the function raises for larger perturbations
        found = []
    if not found or any(rank.problem is not None for ranks in found for rank in ranks):
        return [dataclasses.replace(entry, unclear=entry.blurred and entry.ok) for entry in every]
    wider = [entries(ranks, step) for ranks, step in zip(found, steps, strict=True)]
    largest = max(abs(entry.analytic) for entry in every)
    return [_decided(entry, [step[at] for step in wider], largest) for at, entry in enumerate(every)]


def _decided(entry: Entry, wider: list[Entry], largest: float) -> Entry:
    if not (entry.blurred and entry.ok):
        return entry
    last = wider[-1]
    if all(not each.ok for each in wider):
        return last
    zero = abs(last.analytic) <= _ZERO * largest
    clear = all(each.ok for each in wider) and (zero or not last.blurred)
    return last if clear else dataclasses.replace(last, unclear=True)
