"""What may be wrong with gradients, each tried on the numbers: its prediction has to be every gradient that there is.

A case is one leaf on one rank, along several directions. Finite differences tell what the objective does along them
(`want`), and what each rank's own loss does (`terms`), of which the whole is the sum. A hypothesis predicts from these
what a faulty backward leaves, and fits if that is what was found, in all cases of the leaves that are wrong.
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
    """The hypotheses that fit, the most telling first."""
    of = Cases(cases, ranks, counts)
    if not of.bad:
        return []
    found = [fit for hypothesis in _HYPOTHESES if (fit := hypothesis(of)) is not None]
    return found if found else [fit for fallback in _FALLBACKS if (fit := fallback(of)) is not None][:1]


def _nothing(of: Cases) -> Fit | None:
    if not all(case.is_(torch.zeros_like(case.want)) for case in of.bad):
        return None
    if len(of.bad) == len(of.all):
        return Fit(ZERO_GRAD, "there is no gradient on any rank: the path to the loss is cut")
    unused = [case.rank for case in of.bad if case.terms is not None and _small(case, case.terms[case.rank])]
    whose = " whose own loss does not depend on it" if len(unused) == len(of.bad) else ""
    return Fit(
        DROPPED,
        f"there is none on ranks {_listed(case.rank for case in of.bad)}{whose}; the others' losses do",
    )


def _times(factor: Callable[[int], float], name: str, text: str) -> Callable[[Cases], Fit | None]:
    def hypothesis(of: Cases) -> Fit | None:
        c = factor(of.ranks)
        fit = of.ranks > 1 and all(case.is_(c * case.want, c) for case in of.all)
        return Fit(name, text.format(W=of.ranks)) if fit else None

    return hypothesis


def _own_alone(of: Cases) -> Fit | None:
    """That each rank has only what its own loss gives."""
    for factor in (1, of.ranks):  # under the mean of the losses each term has a 1/W
        if all(
            case.terms is not None and case.is_(factor * case.terms[case.rank], factor) for case in of.all
        ):
            return Fit(
                SUM_MISSING,
                "each rank's gradient is that of its own loss alone; the other ranks' are not added",
            )
    invariant = [case for case in of.all if case.type is Type.I]
    if len(invariant) < len(of.all):
        return None
    for name in {case.name for case in invariant}:
        mine = [case for case in invariant if case.name == name]
        apart = any(not case.is_(mine[0].got) for case in mine[1:])
        if not apart or not mine[0].is_(mine[0].want - sum(case.got for case in mine[1:])):
            return None
    return Fit(SUM_MISSING, "each rank has a share of the gradient, and their sum is it; it was not taken")


def _summed_values(of: Cases) -> Fit | None:
    """That gradients of what each rank has for itself were added up over the ranks."""
    for case in of.all:
        others = of.others(case)
        if case.type is Type.I or len(others) < of.ranks - 1:
            return None
        if not case.is_(case.want + sum((other.want for other in others), torch.zeros(())), of.ranks):
            return None
    return Fit(TWICE, "each rank has the sum of all ranks' gradients, where its own is asked for")


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
            more = "" if what == "gradient" else ", and only what its own loss gives"
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
                f"{whose} is weighted as if all ranks had as many rows: by {shown} for rows {list(of.counts)}",
            )
    return None


def _weighted(terms: Tensor, weights: Sequence[float]) -> Tensor:
    return (torch.tensor(weights, dtype=torch.float64).unsqueeze(1) * terms).sum(0)


def _conjugate(of: Cases) -> Fit | None:
    if all(case.conjugate_is_right() for case in of.all if case.conjugate is not None) and all(
        case.conjugate is not None for case in of.bad
    ):
        return Fit(CONJUGATE, "the conjugate of each gradient is right")
    return None


def _some_losses(of: Cases) -> Fit | None:
    """That the losses of some ranks are left out."""
    weights = of.solved(lambda case: None if case.terms is None else list(case.terms))
    if weights is None or not all(min(abs(w), abs(w - 1)) < 1e-4 for w in weights):
        return None
    left_out = [rank for rank, w in enumerate(weights) if abs(w) < 0.5]
    return (
        Fit(DROPPED, f"what the losses of ranks {_listed(left_out)} give is left out") if left_out else None
    )


def _term(of: Cases) -> Fit | None:
    """That a rank's own term, or those of the others, have a factor."""

    def columns(case: Case) -> list[Tensor] | None:
        return None if case.terms is None else [case.terms[case.rank], case.want - case.terms[case.rank]]

    factors = of.solved(columns)
    if factors is None:
        return None
    own, others = factors
    if abs(others - 1) < 1e-4:
        return Fit(
            TERM, f"what a rank's own loss gives is {own:.6g} times what it should be; the rest is right"
        )
    if abs(own - 1) < 1e-4:
        return Fit(TERM, f"what the other ranks' losses give is {others:.6g} times what it should be")
    return None


def _one_loss(of: Cases) -> Fit | None:
    """That what one rank's loss gives has a factor."""
    weights = of.solved(lambda case: None if case.terms is None else list(case.terms))
    if weights is None:
        return None
    scaled = [(rank, w) for rank, w in enumerate(weights) if abs(w - 1) > 1e-4]
    if len(scaled) == of.ranks:
        return None
    shown = ", ".join(f"rank {rank}'s by {w:.6g}" for rank, w in scaled)
    return Fit(TERM, f"of what the ranks' losses give some is scaled: {shown}")


def _scaled(of: Cases) -> Fit | None:
    factor = of.solved(lambda case: [case.want])
    return (
        None if factor is None else Fit(SCALED, f"each gradient is {factor[0]:.6g} times what it should be")
    )


def _scaled_by_rank(of: Cases) -> Fit | None:
    factors = {}
    for rank in sorted({case.rank for case in of.all}):
        mine = Cases([case for case in of.all if case.rank == rank], of.ranks, of.counts)
        solved = mine.solved(lambda case: [case.want]) if mine.all else [1.0]
        if solved is None:
            return None
        factors[rank] = solved[0]
    shown = ", ".join(f"{factor:.6g} on rank {rank}" for rank, factor in factors.items())
    return Fit(SCALED, f"each gradient has its rank's factor: {shown}")


def _small(case: Case, x: Tensor) -> bool:
    return bool((x.abs() <= case.allowed).all())


def _listed(ranks: object) -> str:
    return ", ".join(map(str, sorted(set(ranks))))  # type: ignore[call-overload]


_HYPOTHESES: list[Callable[[Cases], Fit | None]] = [
    _nothing,
    _own_alone,
    _times(
        lambda ranks: float(ranks),
        TIMES_W,
        "each gradient is {W} times what it should be, the number of ranks",
    ),
    _times(lambda ranks: 1 / ranks, UNDER_W, "each gradient is 1/{W} of what it should be, of {W} ranks"),
    _summed_values,
    _slice,
    _means,
    _conjugate,
]
_FALLBACKS: list[Callable[[Cases], Fit | None]] = [_some_losses, _term, _one_loss, _scaled, _scaled_by_rank]
"""What has factors of its own that are solved for, and is asked only where none of the others fits."""
