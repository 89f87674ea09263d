"""Explains wrong gradients: tests hypotheses on the values, and modifies collectives to see which change fixes them.

A case is one leaf on one rank, along several directions. Finite differences give the derivative of the objective along
them (`want`) and of each rank's loss (`terms`), whose sum is `want`. A hypothesis predicts from these the gradients of
a faulty backward. It fits if the prediction equals the gradients in all cases of the leaves with wrong gradients.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradmesh.errors import RankError
from gradmesh.types import Type
from gradmesh.verify.gradients.calls import (
    CONJ,
    DOUBLE,
    GATHERED,
    PART,
    SUM,
    Found,
    Place,
    Trials,
    investigate,
)
from gradmesh.verify.gradients.program import Measured, Options, Run, measure
from gradmesh.verify.gradients.report import (
    NONE_FITS,
    Diagnosis,
    Slopes,
    Suspect,
    along,
    entries,
    slopes,
    tolerance,
)
from gradmesh.verify.laws import as_real


@dataclass(frozen=True)
class Case:
    """A leaf on a rank."""

    name: str  # the leaf
    type: Type  # its type over the ranks
    rank: int
    got: Tensor  # its gradient along each direction
    conjugate: Tensor | None  # the conjugate of its gradient along each direction; None for real leaves
    want: Tensor  # the derivative of the objective along each direction
    # the derivative of each rank's loss along each direction; None for a replicated objective
    terms: Tensor | None
    allowed: Tensor  # the tolerance, from rounding

    def is_(self, predicted: Tensor, factor: float = 1.0) -> bool:
        """Whether the gradient equals a prediction, which scales the tolerance if it contains a factor."""
        return self._near(self.got, predicted, factor)

    @property
    def right(self) -> bool:
        """Whether the gradient is correct."""
        return self.is_(self.want)

    @property
    def conjugate_right(self) -> bool:
        """Whether the conjugate of the gradient is correct."""
        return self.conjugate is not None and self._near(self.conjugate, self.want)

    def _near(self, got: Tensor, predicted: Tensor, factor: float = 1.0) -> bool:
        allowed = self.allowed * max(1.0, abs(factor))
        return got.shape == predicted.shape and bool(((got - predicted).abs() <= allowed).all())


@dataclass(frozen=True)
class Fit:
    """A hypothesis that fits, and its description for this program."""

    name: str
    text: str


class Cases:
    """All cases of the leaves with wrong gradients."""

    def __init__(self, cases: Sequence[Case], ranks: int, counts: Sequence[int] | None) -> None:
        wrong = {case.name for case in cases if not case.right}
        self.all = [case for case in cases if case.name in wrong]
        self.bad = [case for case in self.all if not case.right]
        self.ranks, self.counts = ranks, counts

    def others(self, case: Case) -> list[Case]:
        """The cases of the same leaf on other ranks along the same directions."""
        return [
            other
            for other in self.all
            if other.name == case.name and other.rank != case.rank and other.want.shape == case.want.shape
        ]

    def weights(self) -> list[float] | None:
        """The factors of the ranks' terms for which they sum to the gradient; None if there are none."""
        return self.solved(lambda case: None if case.terms is None else list(case.terms))

    def solved(self, columns: Callable[[Case], list[Tensor] | None]) -> list[float] | None:
        """The factors for which the columns sum to the gradient in all cases; None if there are none."""
        rows, found = [], []
        for case in self.all:
            made = columns(case)
            if made is None:
                return None
            rows.append(torch.stack(made, 1) / case.allowed.unsqueeze(1))
            found.append(case.got / case.allowed)
        a = torch.cat(rows)
        if not bool((a.norm(dim=0) > 1).all()):
            return None
        factors = _fitted(a, torch.cat(found))
        return None if factors is None else factors.tolist()


def _fitted(columns: Tensor, wanted: Tensor) -> Tensor | None:
    """The factors for which the columns sum to the wanted values; None if there are none, or not only one choice.

    All values are in units of the tolerance. The factor of a column that is below it is 0.
    """
    size = columns.norm(dim=0)
    there = size > 1
    if not bool(there.any()) or columns.shape[0] <= columns.shape[1]:
        return None
    scaled = columns[:, there] / size[there]
    if int(torch.linalg.matrix_rank(scaled, rtol=1e-6)) < scaled.shape[1]:
        return None
    factors = torch.zeros_like(size)
    solution = torch.linalg.lstsq(scaled, wanted.unsqueeze(1), driver="gelsd").solution
    factors[there] = solution.squeeze(1) / size[there]
    allowed = max(1.0, float(factors.abs().max()))
    return factors if bool(((columns @ factors - wanted).abs() <= allowed).all()) else None


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


def fitting(cases: Sequence[Case], ranks: int, counts: Sequence[int] | None) -> list[Fit]:
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
    unused = [
        case.rank
        for case in of.bad
        if case.terms is not None and bool((case.terms[case.rank].abs() <= case.allowed).all())
    ]
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
            case.terms is not None and case.is_(case.terms.new_tensor(weights) @ case.terms, max(weights))
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


def _conjugate(of: Cases) -> Fit | None:
    if all(case.conjugate_right for case in of.all if case.conjugate is not None or not case.right):
        return Fit(CONJUGATE, "the conjugate of each gradient is correct")
    return None


def _some_losses(of: Cases) -> Fit | None:
    """The losses of some ranks do not contribute."""
    weights = of.weights()
    if weights is None or not all(min(abs(w), abs(w - 1)) < 1e-4 for w in weights):
        return None
    left_out = [rank for rank, w in enumerate(weights) if abs(w) < 0.5]
    if not left_out:
        return None
    return Fit(DROPPED, f"the contribution of the losses of ranks {_listed(left_out)} is missing")


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
    weights = of.weights()
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


_VAGUE = (NONE_FITS, SCALED, TERM)
"""Generic hypotheses that a successful fix may refine."""


@dataclasses.dataclass(frozen=True)
class _Fix:
    """A change of one collective that makes every gradient correct."""

    found: Found
    how: str
    factors: list[float]
    """The required factors of its gradient: one for all ranks, or one per rank."""
    at: int


def suspects(
    diagnosis: Diagnosis,
    run: Run,
    found: list[Measured],
    known: list[Slopes],
    options: Options,
    rows: Sequence[int] | None,
) -> None:
    """Add the collectives that may be at fault to a diagnosis, and refine its hypothesis."""
    vectors = _Vectors(found, known, options)
    trials: list[Trials] = run(investigate, options)
    places = {each.place: each for rank in trials for each in rank.found}
    fixes = _fixes(trials, vectors, places, together=1)
    if not fixes and diagnosis.hypothesis in _VAGUE:
        # one rank at a time, to find a factor for each rank
        fixes = _fixes(run(investigate, options, True), vectors, places, together=len(found))
    # Several changes may fix them: prefer user code over gradmesh, what is not the exact adjoint, and simple changes.
    exact = {first.place for at, first in enumerate(trials[0].tried) if _is_adjoint(trials, at)}
    fixes.sort(
        key=lambda each: (
            each.found.ours,
            each.found.place in exact,
            _COMPLEXITY.get(each.how, len(_COMPLEXITY)),
        )
    )
    for each in fixes:
        text = each.found.place.text
        if all(suspect.call != text for suspect in diagnosis.suspects):
            diagnosis.suspects.append(_suspect(each.found, _evidence(each, len(found)), True))
    if fixes:
        _refine(diagnosis, fixes, trials, len(found), rows)
    if not diagnosis.suspects:
        diagnosis.suspects = _likely(diagnosis.hypothesis, list(places.values()))


def _is_adjoint(trials: list[Trials], at: int) -> bool:
    """Whether a gather returns, on every rank, its slice of the sum over the ranks of the incoming gradients."""
    found = [rank.tried[at].local for rank in trials]
    return all(local is not None and torch.allclose(local.got, local.want, rtol=1e-9) for local in found)


def _fixes(trials: list[Trials], vectors: _Vectors, places: dict[Place, Found], together: int) -> list[_Fix]:
    """The changes that make every gradient correct, where so many trials in a row change one collective."""
    result = []
    for at in range(0, len(trials[0].tried), together):
        first = trials[0].tried[at]
        gradients = [[rank.tried[at + n].gradients for rank in trials] for n in range(together)]
        factors = vectors.fixing_factors(gradients, by_factor=first.how == DOUBLE)
        if factors is not None:
            result.append(_Fix(places[first.place], first.how, factors, at))
    return result


_COMPLEXITY = {DOUBLE: 0, GATHERED: 1, PART: 2, SUM: 3, CONJ: 4}


class _Vectors:
    """The wrong and the correct gradients along all directions, to compare with those of trials."""

    def __init__(self, found: list[Measured], known: list[Slopes], options: Options) -> None:
        self._found, self._options = found, options
        self.base, self._want, self._allowed = self._of(known)

    def _of(self, known: list[Slopes]) -> tuple[Tensor, Tensor, Tensor]:
        got, want, allowed = [], [], []
        shares: dict[str, list[Slopes]] = {}
        for slope in known:
            if slope.move.type is Type.R:
                shares.setdefault(slope.move.name, []).append(slope)
                continue
            for rank in slope.holders:
                got.append(slope.analytic[rank])
                want.append(slope.total)
                allowed.append(tolerance(slope, self._options))
        for parts in shares.values():  # only the sum over the ranks is determined
            got.append(torch.stack([part.analytic.sum(0) for part in parts]).sum(0))
            want.append(torch.stack([part.total for part in parts]).sum(0))
            allowed.append(torch.stack([tolerance(part, self._options) for part in parts]).sum(0))
        return torch.cat(got), torch.cat(want), torch.cat(allowed)

    def changed(self, gradients: list[dict[str, Tensor | None]]) -> Tensor:
        """The gradients of a trial."""
        ranks = [
            dataclasses.replace(rank, gradients={1: each})
            for rank, each in zip(self._found, gradients, strict=True)
        ]
        return self._of(slopes(ranks, self._options))[0]

    def fixing_factors(
        self, gradients: list[list[dict[str, Tensor | None]]], by_factor: bool
    ) -> list[float] | None:
        """The factors of the changes that make every gradient correct; None if there are none.

        With `by_factor` the changes doubled a gradient, so that other factors can be extrapolated.
        """
        changed = [self.changed(each) for each in gradients]
        if not by_factor:
            return [1.0] if bool(((changed[0] - self._want).abs() <= self._allowed).all()) else None
        through = torch.stack([(each - self.base) / self._allowed for each in changed], 1)
        factors = _fitted(through, (self._want - self.base) / self._allowed)
        return None if factors is None else (1 + factors).tolist()


def _evidence(fix: _Fix, ranks: int) -> str:
    how, factors = fix.how, fix.factors
    if how == DOUBLE and len(factors) > 1:
        shown = ", ".join(f"{factor:.6g} on rank {rank}" for rank, factor in enumerate(factors))
        return f"scaling its backward by {shown} makes every gradient correct"
    if how == DOUBLE:
        names = {float(ranks): " (the number of ranks)", 1 / ranks: " (1 / the number of ranks)"}
        known = next((name for value, name in names.items() if abs(factors[0] - value) < 1e-6), "")
        return f"scaling its backward by {factors[0]:.6g}{known} makes every gradient correct"
    what = "the gradient of its output" if how == GATHERED else "the gradient that its backward returns"
    return f"every gradient is correct if {what} is {how}"


def _suspect(found: Found, why: str, fixes: bool) -> Suspect:
    inside = f"; inside: {', '.join(found.inside)}" if found.inside else ""
    return Suspect(found.place.text, why + inside, fixes)


def _refine(
    diagnosis: Diagnosis, fixes: list[_Fix], trials: list[Trials], ranks: int, rows: Sequence[int] | None
) -> None:
    """Refine the hypothesis using the changes that fix the gradients."""
    best = fixes[0]
    gather = next((each for each in fixes if each.how == PART and each.found is best.found), None)
    local = [] if gather is None else _gather_hypotheses(gather, trials)
    names = {fit.name: fit for fit in local}
    if SUM_MISSING in names and DROPPED in names:
        # Both predict the same values if only other ranks' losses contribute; the backward's collectives decide.
        chosen, other = (DROPPED, SUM_MISSING) if best.found.back else (SUM_MISSING, DROPPED)
        _set(diagnosis, chosen, f"in one collective, {names[chosen].text}")
        diagnosis.also = [f"{other} ({names[other].text})"]
        return
    if diagnosis.hypothesis not in _VAGUE:
        return
    if best.how == DOUBLE:
        _by_factor(diagnosis, best.factors, ranks, rows)
    elif local:
        name = TERM if local[0].name in (TIMES_W, UNDER_W, SCALED) else local[0].name
        _set(diagnosis, name, f"in one collective, {local[0].text}")
    else:
        name = {SUM: SUM_MISSING, GATHERED: SUM_MISSING, CONJ: CONJUGATE}.get(best.how, SLICE)
        _set(diagnosis, name, f"every gradient is correct if one collective's gradient is {best.how}")


def _set(diagnosis: Diagnosis, name: str, text: str) -> None:
    diagnosis.hypothesis, diagnosis.text, diagnosis.also = name, text, []


def _by_factor(diagnosis: Diagnosis, factors: list[float], ranks: int, rows: Sequence[int] | None) -> None:
    faults = [1 / factor if abs(factor) > 1e-9 else float("inf") for factor in factors]
    if len(faults) == 1:
        if diagnosis.hypothesis == SCALED:
            return
        known = {float(ranks): " (W)", 1 / ranks: " (1/W)"}
        name = next((name for value, name in known.items() if abs(faults[0] - value) < 1e-6), "")
        what = f"{faults[0]:.6g} times{name} the correct one; the other terms are correct"
        _set(diagnosis, TERM, f"the gradient through one collective is {what}")
        return
    shown = ", ".join(f"{fault:.6g} on rank {rank}" for rank, fault in enumerate(faults))
    what = f"the gradient through one collective has a factor that depends on the rank: {shown}"
    share = [] if rows is None or 0 in rows else [ranks * count / sum(rows) for count in rows]
    for weights in ([1 / each for each in share], share):
        if weights and all(abs(a - b) < 1e-4 for a, b in zip(weights, faults, strict=True)):
            _set(
                diagnosis, MEANS, f"{what}; these factors follow from the numbers of rows {list(rows or [])}"
            )
            return
    _set(diagnosis, TERM, what)


def _gather_hypotheses(fix: _Fix, trials: list[Trials]) -> list[Fit]:
    """The hypotheses that explain the gradient that one gather returns, given its incoming gradient on every rank."""
    found = [rank.tried[fix.at].local for rank in trials]
    there = [local for local in found if local is not None]
    if len(there) < len(found):
        return []
    cases = []
    for rank, local in enumerate(there):
        got, want = _flat(local.got), _flat(local.want)
        terms = torch.stack([_flat(term) for term in local.terms])
        allowed = 1e-9 * (1 + terms.abs().sum(0))
        conjugate = _flat(local.got.conj()) if local.got.is_complex() else None
        cases.append(Case("", Type.V, rank, got, conjugate, want, terms, allowed))
    return fitting(cases, len(there), [len(local.got) if local.got.dim() else 1 for local in there])


def _flat(x: Tensor) -> Tensor:
    return as_real(x).reshape(-1)


def _likely(hypothesis: str, places: list[Found]) -> list[Suspect]:
    """If no change fixes the gradients: the collectives that are known to cause such an error."""
    raw = [each for each in places if each.raw]
    own = [each for each in places if not each.raw and not each.ours]
    if hypothesis not in (SUM_MISSING, ZERO_GRAD, DROPPED, NONE_FITS):
        return [_suspect(each, "its backward calls a collective", False) for each in own if each.back]
    undifferentiated = "autograd does not differentiate it; use the gradmesh verb of that name"
    forward_only = "its forward calls a collective, its backward does not"
    return [_suspect(each, undifferentiated, False) for each in raw] + [
        _suspect(each, forward_only, False) for each in own if not each.back
    ]


_DIRECTIONS = 6


def diagnosed(run: Run, options: Options) -> Diagnosis:
    """Explain why first-order gradients are wrong."""
    split = options.objective != "replicated"
    closer = dataclasses.replace(
        options, order=1, forward=False, split=split, directions=max(_DIRECTIONS, options.directions)
    )
    found: list[Measured] = run(measure, closer)
    known = slopes(found, closer)
    every = cases(found, known, closer)
    wrong = [case for case in every if not case.right]
    fits = fitting(every, len(found), _rows(found))
    diagnosis = Diagnosis(NONE_FITS, "no hypothesis predicts these gradients")
    if not wrong:
        return Diagnosis(NONE_FITS, "the gradients are correct when measured along more directions")
    if fits:
        diagnosis = Diagnosis(
            fits[0].name, fits[0].text, also=[f"{fit.name} ({fit.text})" for fit in fits[1:]]
        )
    elif _smooth_alone(run, options):
        diagnosis = Diagnosis(
            PRECISION,
            "the gradients are correct to three digits only, so part of the program computes in a lower precision "
            "than float64",
        )
    diagnosis.names = list(dict.fromkeys(case.name for case in wrong))
    diagnosis.ranks = sorted({case.rank for case in wrong})
    try:
        suspects(diagnosis, run, found, known, closer, _rows(found))
    except RankError as error:
        diagnosis.also.append(f"collectives were not tested: {str(error).splitlines()[0]}")
    return diagnosis


def cases(found: list[Measured], known: list[Slopes], options: Options) -> list[Case]:
    """One case for every leaf on every rank that has it."""
    result = []
    for slope in known:
        move = slope.move
        for rank in slope.holders:
            grad = found[rank].gradients[1].get(move.name)
            result.append(
                Case(
                    name=move.name,
                    type=move.type,
                    rank=rank,
                    got=slope.analytic[rank],
                    conjugate=_conjugate_slopes(grad, slope, options, rank),
                    want=slope.total,
                    terms=slope.by_rank if options.objective != "replicated" else None,
                    allowed=tolerance(slope, options),
                )
            )
    return result


def _conjugate_slopes(grad: Tensor | None, slope: Slopes, options: Options, rank: int) -> Tensor | None:
    move = slope.move
    if not move.dtype.is_complex or move.count == 0:
        return None
    return along(None if grad is None else grad.conj(), move, options, rank)


def _rows(found: list[Measured]) -> Sequence[int] | None:
    """Each rank's number of rows: the sizes along dim 0 of the first varying leaf where they differ."""
    for name in found[0].leaves:
        kept = [rank.leaves.get(name) for rank in found]
        rows = [each.shape[0] for each in kept if each is not None and each.type is Type.V and each.shape]
        if len(rows) == len(found) and len(set(rows)) > 1:
            return rows
    return None


def _smooth_alone(run: Run, options: Options) -> bool:
    """Whether the gradients are correct with a much larger step and tolerance."""
    coarse = dataclasses.replace(options, order=1, forward=False, eps=1e-3, rtol=1e-3, atol=1e-3)
    return all(entry.ok for entry in entries(run(measure, coarse), coarse))
