"""Error hypotheses; one is accepted only if it predicts every observed gradient.

A case is one leaf on one rank, along several directions. Finite differences give the derivative of the objective along
them (`want`) and of each rank's loss (`terms`), whose sum is `want`. A hypothesis predicts from these the gradients of
a faulty backward. It fits if the prediction equals the gradients in all cases of the leaves with wrong gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gradmesh.types import Type
from gradmesh.verify.gradients.cases import Case, Cases, Fit

__all__ = [
    "CONJUGATE",
    "DROPPED",
    "MEANS",
    "PRECISION",
    "SCALED",
    "SLICE",
    "SUM_MISSING",
    "TERM",
    "TIMES_W",
    "TWICE",
    "UNDER_W",
    "ZERO_GRAD",
    "Case",
    "Fit",
    "fits",
]

TIMES_W = "W times too large"
UNDER_W = "1/W"
SUM_MISSING = "sum over ranks missing"
TWICE = "summed twice"
SLICE = "another rank's slice"
MEANS = "mean of local means"
DROPPED = "dropped on ranks that did not use the output"
CONJUGATE = "conjugate missing"
TERM = "one term of several scaled"
SCALED = "scaled"
ZERO_GRAD = "no gradient"
PRECISION = "precision lost"


def fits(cases: Sequence[Case], ranks: int, counts: Sequence[int] | None) -> list[Fit]:
    """The hypotheses that fit, the most specific first."""
    of = Cases(cases, ranks, counts)
    if not of.bad:
        return []
    found = [fit for hypothesis in _HYPOTHESES if (fit := hypothesis(of)) is not None]
    return found if found else [fit for fallback in _FALLBACKS if (fit := fallback(of)) is not None][:1]


def _no_gradient(of: Cases) -> Fit | None:
    if not all(case.is_(torch.zeros_like(case.want)) for case in of.bad):
        return None
    if len(of.bad) == len(of.all):
        return Fit(
            ZERO_GRAD, "the gradient is None or zero on every rank: the graph from the loss is interrupted"
        )
    unused = [case.rank for case in of.bad if case.terms is not None and _small(case, case.terms[case.rank])]
    whose = ", whose losses do not depend on it" if len(unused) == len(of.bad) else ""
    return Fit(
        DROPPED,
        f"the gradient is None or zero on ranks {_listed(case.rank for case in of.bad)}{whose}; other ranks' losses do",
    )


def _times(factor: Callable[[int], float], name: str, text: str) -> Callable[[Cases], Fit | None]:
    def hypothesis(of: Cases) -> Fit | None:
        c = factor(of.ranks)
        fit = of.ranks > 1 and all(case.is_(c * case.want, c) for case in of.all)
        return Fit(name, text.format(W=of.ranks)) if fit else None

    return hypothesis


def _local_only(of: Cases) -> Fit | None:
    """Each rank's gradient comes from its own loss only."""
    for factor in (1, of.ranks):  # with objective "mean" each term has a factor 1/W
        if all(
            case.terms is not None and case.is_(factor * case.terms[case.rank], factor) for case in of.all
        ):
            return Fit(
                SUM_MISSING,
                "each rank's gradient comes from its own loss only; the other ranks' contributions are not added",
            )
    invariant = [case for case in of.all if case.type is Type.I]
    if len(invariant) < len(of.all):
        return None
    for name in {case.name for case in invariant}:
        mine = [case for case in invariant if case.name == name]
        differs = any(not case.is_(mine[0].got) for case in mine[1:])
        if not differs or not mine[0].is_(mine[0].want - sum(case.got for case in mine[1:])):
            return None
    return Fit(SUM_MISSING, "each rank has one contribution to the gradient; they are not summed over ranks")


def _summed_values(of: Cases) -> Fit | None:
    """Gradients of rank-local values were summed over the ranks."""
    for case in of.all:
        others = of.others(case)
        if case.type is Type.I or len(others) < of.ranks - 1:
            return None
        if not case.is_(case.want + sum((other.want for other in others), torch.zeros(())), of.ranks):
            return None
    return Fit(TWICE, "each rank has the sum of all ranks' gradients instead of its own")


def _slice(of: Cases) -> Fit | None:
    for what in ("gradient", "share"):
        whose: dict[int, set[int]] = {}
        for case in of.bad:
            same = {other.rank for other in of.others(case) if _taken(case, other, what)}
            whose[case.rank] = whose.get(case.rank, same) & same
        if whose and all(whose.values()):
            pairs = ", ".join(
                f"rank {rank} has that of rank {min(other)}" for rank, other in sorted(whose.items())
            )
            more = "" if what == "gradient" else ", and only the contribution of its own loss"
            return Fit(SLICE, pairs + more)
    return None


def _taken(case: Case, other: Case, what: str) -> bool:
    if what == "gradient":
        return case.is_(other.want)
    return other.terms is not None and case.is_(other.terms[case.rank])


def _means(of: Cases) -> Fit | None:
    if of.counts is None or len(set(of.counts)) == 1 or 0 in of.counts:
        return None
    share = [of.ranks * count / sum(of.counts) for count in of.counts]
    for weights in ([1 / s for s in share], share):
        by_holder = all(case.is_(weights[case.rank] * case.want, weights[case.rank]) for case in of.all)
        by_loss = all(
            case.terms is not None and case.is_(_weighted(case.terms, weights), max(weights))
            for case in of.all
        )
        if by_holder or by_loss:
            shown = ", ".join(f"{weight:.4g}" for weight in weights)
            whose = "the gradient on rank r" if by_holder else "rank r's term"
            return Fit(
                MEANS,
                f"{whose} is weighted as if all ranks had equally many rows: by {shown}, for rows {list(of.counts)}",
            )
    return None


def _weighted(terms: Tensor, weights: Sequence[float]) -> Tensor:
    return (torch.tensor(weights, dtype=torch.float64).unsqueeze(1) * terms).sum(0)


def _conjugate(of: Cases) -> Fit | None:
    if all(case.conjugate_is_right() for case in of.all if case.conjugate is not None) and all(
        case.conjugate is not None for case in of.bad
    ):
        return Fit(CONJUGATE, "the conjugate of each gradient is correct")
    return None


def _some_losses(of: Cases) -> Fit | None:
    """The losses of some ranks do not contribute."""
    weights = of.solved(lambda case: None if case.terms is None else list(case.terms))
    if weights is None or not all(min(abs(w), abs(w - 1)) < 1e-4 for w in weights):
        return None
    left_out = [rank for rank, w in enumerate(weights) if abs(w) < 0.5]
    return (
        Fit(DROPPED, f"the contribution of the losses of ranks {_listed(left_out)} is missing")
        if left_out
        else None
    )


def _term(of: Cases) -> Fit | None:
    """The contribution of a rank's own loss, or those of the other ranks, have a factor."""

    def columns(case: Case) -> list[Tensor] | None:
        return None if case.terms is None else [case.terms[case.rank], case.want - case.terms[case.rank]]

    factors = of.solved(columns)
    if factors is None:
        return None
    own, others = factors
    if abs(others - 1) < 1e-4:
        return Fit(
            TERM, f"the contribution of a rank's own loss has a factor of {own:.6g}; the others are correct"
        )
    if abs(own - 1) < 1e-4:
        return Fit(TERM, f"the contribution of the other ranks' losses has a factor of {others:.6g}")
    return None


def _one_loss(of: Cases) -> Fit | None:
    """The contributions of some ranks' losses have a factor."""
    weights = of.solved(lambda case: None if case.terms is None else list(case.terms))
    if weights is None:
        return None
    scaled = [(rank, w) for rank, w in enumerate(weights) if abs(w - 1) > 1e-4]
    if len(scaled) == of.ranks:
        return None
    shown = ", ".join(f"{w:.6g} for rank {rank}" for rank, w in scaled)
    return Fit(TERM, f"the contributions of some ranks' losses have a factor: {shown}")


def _scaled(of: Cases) -> Fit | None:
    factor = of.solved(lambda case: [case.want])
    return None if factor is None else Fit(SCALED, f"each gradient is {factor[0]:.6g} times the correct one")


def _scaled_by_rank(of: Cases) -> Fit | None:
    factors = {}
    for rank in sorted({case.rank for case in of.all}):
        mine = Cases([case for case in of.all if case.rank == rank], of.ranks, of.counts)
        solved = mine.solved(lambda case: [case.want]) if mine.all else [1.0]
        if solved is None:
            return None
        factors[rank] = solved[0]
    shown = ", ".join(f"{factor:.6g} on rank {rank}" for rank, factor in factors.items())
    return Fit(SCALED, f"each gradient has a factor that depends on the rank: {shown}")


def _small(case: Case, x: Tensor) -> bool:
    return bool((x.abs() <= case.allowed).all())


def _listed(ranks: object) -> str:
    return ", ".join(map(str, sorted(set(ranks))))  # type: ignore[call-overload]


_HYPOTHESES: list[Callable[[Cases], Fit | None]] = [
    _no_gradient,
    _local_only,
    _times(
        lambda ranks: float(ranks),
        TIMES_W,
        "each gradient is {W} times the correct one; {W} is the number of ranks",
    ),
    _times(
        lambda ranks: 1 / ranks,
        UNDER_W,
        "each gradient is 1/{W} of the correct one; {W} is the number of ranks",
    ),
    _summed_values,
    _slice,
    _means,
    _conjugate,
]
_FALLBACKS: list[Callable[[Cases], Fit | None]] = [_some_losses, _term, _one_loss, _scaled, _scaled_by_rank]
"""Hypotheses with free factors that are fitted; tried only if none of the others fits."""
