"""What may be wrong with gradients, each tried on the numbers: its prediction has to be every gradient that there is.

A case is one leaf on one rank, along several directions. Finite differences tell what the objective does along them
(`want`), and what each rank's own loss does (`terms`), of which the whole is the sum. A hypothesis predicts from these
what a faulty backward leaves, and fits if that is what was found, in all cases of the leaves that are wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradmesh.types import Type

__all__ = [
    "CONJUGATE",
    "DROPPED",
    "MEANS",
    "NOTHING",
    "PRECISION",
    "SCALED",
    "SLICE",
    "SUM_MISSING",
    "TERM",
    "TIMES_W",
    "TWICE",
    "UNDER_W",
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
NOTHING = "no gradient"
PRECISION = "precision lost"


@dataclass(frozen=True)
class Case:
    """A leaf on a rank.

    Attributes:
        name: the leaf.
        type: what it is over the ranks.
        rank: the rank.
        got: its gradient along each direction.
        conjugate: the conjugate of its gradient along each; None for a real one.
        want: what the objective does along each.
        terms: what each rank's part of the objective does along each; None where the parts are all the whole.
        allowed: what rounding explains.
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
        """Whether the gradient is what is predicted."""
        return self._near(self.got, predicted, factor)

    @property
    def right(self) -> bool:
        """Whether the gradient is right."""
        return self.is_(self.want)

    def _near(self, got: Tensor, predicted: Tensor, factor: float = 1.0) -> bool:
        return got.shape == predicted.shape and bool(
            ((got - predicted).abs() <= self.allowed * max(1.0, abs(factor))).all()
        )

    def conjugate_is_right(self) -> bool:
        """Whether the conjugate of the gradient is."""
        return self.conjugate is not None and self._near(self.conjugate, self.want)


@dataclass(frozen=True)
class Fit:
    """A hypothesis that fits, and what it says of this program."""

    name: str
    text: str


class Cases:
    """All cases of the leaves that are wrong.

    Args:
        cases: these.
        ranks: how many ranks there are.
        counts: how many rows each rank has, where that differs.
    """

    def __init__(self, cases: Sequence[Case], ranks: int, counts: Sequence[int] | None) -> None:
        wrong = {case.name for case in cases if not case.right}
        self.all = [case for case in cases if case.name in wrong]
        self.bad = [case for case in self.all if not case.right]
        self.ranks, self.counts = ranks, counts
        self._of: dict[tuple[str, int], Case] = {(case.name, case.rank): case for case in self.all}

    def others(self, case: Case) -> list[Case]:
        """The cases of the same leaf on other ranks, as far as they lie along the same directions."""
        return [
            other
            for other in self.all
            if other.name == case.name and other.rank != case.rank and other.want.shape == case.want.shape
        ]

    def solved(self, columns: Callable[[Case], list[Tensor] | None]) -> list[float] | None:
        """The factors with which the columns add up to what was found, in all cases; None if none do."""
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
        return Fit(NOTHING, "there is no gradient on any rank: the path to the loss is cut")
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
    own = all(case.terms is not None and case.is_(case.terms[case.rank]) for case in of.all)
    if own:
        return Fit(
            SUM_MISSING, "each rank's gradient is that of its own loss alone; the other ranks' are not added"
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
            case.terms is not None and case.is_(_weighted(case, weights), max(weights)) for case in of.all
        )
        if by_holder or by_loss:
            shown = ", ".join(f"{weight:.4g}" for weight in weights)
            whose = "the gradient on rank r" if by_holder else "rank r's term"
            return Fit(
                MEANS,
                f"{whose} is weighted as if all ranks had as many rows: by {shown} for rows {list(of.counts)}",
            )
    return None


def _weighted(case: Case, weights: Sequence[float]) -> Tensor:
    assert case.terms is not None
    return (torch.tensor(weights, dtype=torch.float64).unsqueeze(1) * case.terms).sum(0)


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
