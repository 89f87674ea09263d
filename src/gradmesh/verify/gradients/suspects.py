"""Finds the collectives at fault: those for which changing only their gradient makes every gradient correct."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gradmesh.types import Type
from gradmesh.verify.gradients import hypotheses as h
from gradmesh.verify.gradients.cases import Case, Fit
from gradmesh.verify.gradients.changes import CONJ, DOUBLE, GATHERED, PART, SUM
from gradmesh.verify.gradients.comparisons import Slopes, slopes, tolerance
from gradmesh.verify.gradients.findings import NONE_FITS, Diagnosis, Suspect
from gradmesh.verify.gradients.measure import Measured, Options
from gradmesh.verify.gradients.trials import Found, Trials
from gradmesh.verify.laws import as_real

__all__ = ["suspects"]

_VAGUE = (NONE_FITS, h.SCALED, h.TERM)
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
    run: Callable[[bool], list[Trials]],
    found: list[Measured],
    known: list[Slopes],
    options: Options,
    rows: Sequence[int] | None,
) -> None:
    """Add the collectives that may be at fault to a diagnosis, and refine its hypothesis.

    Args:
        diagnosis: the diagnosis from the gradients only.
        run: runs the trials; True: changing one rank at a time.
        found: the measurements.
        known: the finite differences.
        options: the options of the check.
        rows: each rank's number of rows, if they differ.
    """
    vectors = _Vectors(found, known, options)
    trials = run(False)
    places = {each.place: each for rank in trials for each in rank.found}
    fixes: list[_Fix] = []
    for at, first in enumerate(trials[0].tried):
        gradients = [rank.tried[at].gradients for rank in trials]
        factors = vectors.fixing_factors([gradients], by_factor=first.how == DOUBLE)
        if factors is not None:
            fixes.append(_Fix(places[first.place], first.how, factors, at))
    if not fixes and diagnosis.hypothesis in _VAGUE:
        fixes = _one_rank_at_a_time(run(True), vectors, len(found))
    # Several changes may fix them: prefer user code over gradmesh, what is not the exact adjoint, and simple changes.
    exact = {first.place for at, first in enumerate(trials[0].tried) if _is_adjoint(trials, at)}
    fixes.sort(key=lambda each: (each.found.ours, each.found.place in exact, _complexity(each.how)))
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


def _one_rank_at_a_time(trials: list[Trials], vectors: _Vectors, ranks: int) -> list[_Fix]:
    """The collectives that fix the gradients with one factor per rank."""
    places = {each.place: each for rank in trials for each in rank.found}
    result = []
    for at in range(0, len(trials[0].tried), ranks):
        gradients = [[rank.tried[at + only].gradients for rank in trials] for only in range(ranks)]
        factors = vectors.fixing_factors(gradients, by_factor=True)
        if factors is not None:
            result.append(_Fix(places[trials[0].tried[at].place], DOUBLE, factors, at))
    return result


_SIMPLE_FIRST = [DOUBLE, GATHERED, PART, SUM, CONJ]


def _complexity(how: str) -> int:
    return _SIMPLE_FIRST.index(how) if how in _SIMPLE_FIRST else len(_SIMPLE_FIRST)


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

        Args:
            gradients: for each change, each rank's gradients.
            by_factor: whether the change doubled a gradient, so that other factors can be extrapolated.
        """
        changed = [self.changed(each) for each in gradients]
        if not by_factor:
            return [1.0] if bool(((changed[0] - self._want).abs() <= self._allowed).all()) else None
        through = torch.stack([(each - self.base) / self._allowed for each in changed], 1)
        needed = (self._want - self.base) / self._allowed
        size = through.norm(dim=0)
        there = size > 1
        if not bool(there.any()) or through.shape[0] <= through.shape[1]:
            return None
        columns = through[:, there] / size[there]
        if int(torch.linalg.matrix_rank(columns, rtol=1e-6)) < columns.shape[1]:
            return None
        x = torch.zeros(len(size), dtype=torch.float64)
        x[there] = torch.linalg.lstsq(columns, needed.unsqueeze(1)).solution.squeeze(1) / size[there]
        fits = bool(((needed - through @ x).abs() <= max(1.0, float(x.abs().max()))).all())
        return [1 + float(each) for each in x] if fits else None


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
    diagnosis: Diagnosis,
    fixes: list[_Fix],
    trials: list[Trials],
    ranks: int,
    rows: Sequence[int] | None,
) -> None:
    """Refine the hypothesis using the changes that fix the gradients."""
    best = fixes[0]
    gather = next((each for each in fixes if each.how == PART and each.found is best.found), None)
    local = [] if gather is None else _gather_hypotheses(gather, trials)
    names = {fit.name: fit for fit in local}
    if h.SUM_MISSING in names and h.DROPPED in names:
        # Both predict the same values if only other ranks' losses contribute; the backward's collectives decide.
        chosen, other = (h.DROPPED, h.SUM_MISSING) if best.found.back else (h.SUM_MISSING, h.DROPPED)
        _set(diagnosis, chosen, f"in one collective, {names[chosen].text}")
        diagnosis.also = [f"{other} ({names[other].text})"]
        return
    if diagnosis.hypothesis not in _VAGUE:
        return
    if best.how == DOUBLE:
        _by_factor(diagnosis, best.factors, ranks, rows)
    elif local:
        name = h.TERM if local[0].name in (h.TIMES_W, h.UNDER_W, h.SCALED) else local[0].name
        _set(diagnosis, name, f"in one collective, {local[0].text}")
    else:
        name = {SUM: h.SUM_MISSING, GATHERED: h.SUM_MISSING, CONJ: h.CONJUGATE}.get(best.how, h.SLICE)
        _set(diagnosis, name, f"every gradient is correct if one collective's gradient is {best.how}")


def _set(diagnosis: Diagnosis, name: str, text: str) -> None:
    diagnosis.hypothesis, diagnosis.text, diagnosis.also = name, text, []


def _by_factor(diagnosis: Diagnosis, factors: list[float], ranks: int, rows: Sequence[int] | None) -> None:
    faults = [1 / factor if abs(factor) > 1e-9 else float("inf") for factor in factors]
    if len(faults) == 1:
        if diagnosis.hypothesis == h.SCALED:
            return
        known = {float(ranks): " (W)", 1 / ranks: " (1/W)"}
        name = next((name for value, name in known.items() if abs(faults[0] - value) < 1e-6), "")
        what = f"{faults[0]:.6g} times{name} the correct one; the other terms are correct"
        _set(diagnosis, h.TERM, f"the gradient through one collective is {what}")
        return
    shown = ", ".join(f"{fault:.6g} on rank {rank}" for rank, fault in enumerate(faults))
    what = f"the gradient through one collective has a factor that depends on the rank: {shown}"
    share = [] if rows is None or 0 in rows else [ranks * count / sum(rows) for count in rows]
    for weights in ([1 / each for each in share], share):
        if weights and all(abs(a - b) < 1e-4 for a, b in zip(weights, faults, strict=True)):
            _set(
                diagnosis,
                h.MEANS,
                f"{what}; these factors follow from the numbers of rows {list(rows or [])}",
            )
            return
    _set(diagnosis, h.TERM, what)


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
    return h.fits(cases, len(there), [len(local.got) if local.got.dim() else 1 for local in there])


def _flat(x: Tensor) -> Tensor:
    return as_real(x).reshape(-1)


def _likely(hypothesis: str, places: list[Found]) -> list[Suspect]:
    """If no change fixes the gradients: the collectives that are known to cause such an error."""
    missing = hypothesis in (h.SUM_MISSING, h.ZERO_GRAD, h.DROPPED, NONE_FITS)
    raw = [each for each in places if each.raw]
    forward_only = [each for each in places if not each.raw and not each.ours and not each.back]
    both = [each for each in places if not each.raw and not each.ours and each.back]
    result = []
    if missing:
        result += [
            _suspect(each, "autograd does not differentiate it; use the gradmesh verb of that name", False)
            for each in raw
        ]
        result += [
            _suspect(each, "its forward calls a collective, its backward does not", False)
            for each in forward_only
        ]
    else:
        result += [_suspect(each, "its backward calls a collective", False) for each in both]
    return result
