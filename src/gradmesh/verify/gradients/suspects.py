"""The collectives most likely at fault: those of which a change, tried alone, makes every gradient right."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gradmesh.types import Type
from gradmesh.verify.gradients import hypotheses as h
from gradmesh.verify.gradients.cases import Case, Fit
from gradmesh.verify.gradients.changes import CONJ, DOUBLE, GATHERED, PART, SUM
from gradmesh.verify.gradients.findings import NONE_FITS, Diagnosis, Suspect
from gradmesh.verify.gradients.judge import Slopes, slopes, tolerance
from gradmesh.verify.gradients.measure import Measured, Options
from gradmesh.verify.gradients.trials import Found, Trials
from gradmesh.verify.laws import as_real

__all__ = ["suspects"]

_VAGUE = (NONE_FITS, h.SCALED, h.TERM)
"""Hypotheses that what mends the gradients may tell more of."""


@dataclasses.dataclass(frozen=True)
class _Mending:
    """A change of one collective that makes every gradient right."""

    found: Found
    how: str
    factors: list[float]
    """What its gradient has to be multiplied by: one number for all ranks, or one for each."""
    at: int


def suspects(
    diagnosis: Diagnosis,
    run: Callable[[bool], list[Trials]],
    found: list[Measured],
    known: list[Slopes],
    options: Options,
    rows: Sequence[int] | None,
) -> None:
    """Add the collectives that may be at fault to a diagnosis, and what they tell of its hypothesis.

    Args:
        diagnosis: what the numbers alone tell.
        run: tries changes; True: on one rank after another.
        found: what was measured.
        known: the finite differences.
        options: of the check.
        rows: how many rows each rank has, where that differs.
    """
    vectors = _Vectors(found, known, options)
    trials = run(False)
    places = {each.place: each for rank in trials for each in rank.found}
    mending: list[_Mending] = []
    for at, first in enumerate(trials[0].tried):
        gradients = [rank.tried[at].gradients for rank in trials]
        factors = vectors.mended([gradients], by_factor=first.how == DOUBLE)
        if factors is not None:
            mending.append(_Mending(places[first.place], first.how, factors, at))
    if not mending and diagnosis.hypothesis in _VAGUE:
        mending = _on_one_rank_each(run(True), vectors, len(found))
    # Several changes may mend them: one's own code is the likelier place, and the plainest change the likelier one.
    mending.sort(key=lambda each: (each.found.ours, _plainness(each.how)))
    for each in mending:
        text = each.found.place.text
        if all(suspect.call != text for suspect in diagnosis.suspects):
            diagnosis.suspects.append(_suspect(each.found, _told(each, len(found)), mends=True))
    if mending:
        _sharpen(diagnosis, mending, trials, len(found), rows)
    if not diagnosis.suspects:
        diagnosis.suspects = _likely(diagnosis.hypothesis, list(places.values()))


def _on_one_rank_each(trials: list[Trials], vectors: _Vectors, ranks: int) -> list[_Mending]:
    """The collectives that mend the gradients with a factor for each rank."""
    places = {each.place: each for rank in trials for each in rank.found}
    result = []
    for at in range(0, len(trials[0].tried), ranks):
        gradients = [[rank.tried[at + only].gradients for rank in trials] for only in range(ranks)]
        factors = vectors.mended(gradients, by_factor=True)
        if factors is not None:
            result.append(_Mending(places[trials[0].tried[at].place], DOUBLE, factors, at))
    return result


_PLAIN = [DOUBLE, GATHERED, PART, SUM, CONJ]


def _plainness(how: str) -> int:
    return _PLAIN.index(how) if how in _PLAIN else len(_PLAIN)


class _Vectors:
    """The wrong gradients and the right ones, along all directions, to hold changed ones against."""

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
        for parts in shares.values():  # only the sum over the ranks counts
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

    def mended(self, gradients: list[list[dict[str, Tensor | None]]], by_factor: bool) -> list[float] | None:
        """The factors with which changes make every gradient right; None if there are none.

        Args:
            gradients: those of each change, of each rank.
            by_factor: whether a change doubled what may need another factor.
        """
        changed = [self.changed(each) for each in gradients]
        if not by_factor:
            return [1.0] if bool(((changed[0] - self._want).abs() <= self._allowed).all()) else None
        through = torch.stack([(each - self.base) / self._allowed for each in changed], 1)
        deferred = (self._want - self.base) / self._allowed
        size = through.norm(dim=0)
        there = size > 1
        if not bool(there.any()) or through.shape[0] <= through.shape[1]:
            return None
        columns = through[:, there] / size[there]
        if int(torch.linalg.matrix_rank(columns, rtol=1e-6)) < columns.shape[1]:
            return None
        x = torch.zeros(len(size), dtype=torch.float64)
        x[there] = torch.linalg.lstsq(columns, deferred.unsqueeze(1)).solution.squeeze(1) / size[there]
        fits = bool(((deferred - through @ x).abs() <= max(1.0, float(x.abs().max()))).all())
        return [1 + float(each) for each in x] if fits else None


def _told(mending: _Mending, ranks: int) -> str:
    how, factors = mending.how, mending.factors
    if how == DOUBLE and len(factors) > 1:
        shown = ", ".join(f"{factor:.6g} on rank {rank}" for rank, factor in enumerate(factors))
        return f"with the gradient that it hands back times {shown}, every gradient is right"
    if how == DOUBLE:
        names = {float(ranks): "the number of ranks", 1 / ranks: f"1/{ranks}, of {ranks} ranks"}
        known = next((f" ({name})" for value, name in names.items() if abs(factors[0] - value) < 1e-6), "")
        return f"with {factors[0]:.6g} times the gradient that it hands back{known}, every gradient is right"
    what = "what arrives at its result" if how == GATHERED else "the gradient that it hands back"
    return f"with {what} {how}, every gradient is right"


def _suspect(found: Found, why: str, mends: bool) -> Suspect:
    inside = f"; inside: {', '.join(found.inside)}" if found.inside else ""
    return Suspect(found.place.text, why + inside, mends)


def _sharpen(
    diagnosis: Diagnosis,
    mending: list[_Mending],
    trials: list[Trials],
    ranks: int,
    rows: Sequence[int] | None,
) -> None:
    """Let the changes that mend the gradients say what the numbers at the leaves alone do not."""
    best = mending[0]
    gather = next((each for each in mending if each.how == PART and each.found is best.found), None)
    local = [] if gather is None else _locally(gather, trials)
    names = {fit.name: fit for fit in local}
    if h.SUM_MISSING in names and h.DROPPED in names:
        # The same numbers, where the others' losses are all that a rank has: what its backward calls tells them apart.
        chosen, other = (h.DROPPED, h.SUM_MISSING) if best.found.back else (h.SUM_MISSING, h.DROPPED)
        _set(diagnosis, chosen, f"of one collective, {names[chosen].text}")
        diagnosis.also = [f"{other} ({names[other].text})"]
        return
    if diagnosis.hypothesis not in _VAGUE:
        return
    if best.how == DOUBLE:
        _by_factor(diagnosis, best.factors, ranks, rows)
    elif local:
        name = h.TERM if local[0].name in (h.TIMES_W, h.UNDER_W, h.SCALED) else local[0].name
        _set(diagnosis, name, f"of one collective, {local[0].text}")
    else:
        name = {SUM: h.SUM_MISSING, GATHERED: h.SUM_MISSING, CONJ: h.CONJUGATE}.get(best.how, h.SLICE)
        _set(diagnosis, name, f"where one collective's gradient is {best.how}, every gradient is right")


def _set(diagnosis: Diagnosis, name: str, text: str) -> None:
    diagnosis.hypothesis, diagnosis.text, diagnosis.also = name, text, []


def _by_factor(diagnosis: Diagnosis, factors: list[float], ranks: int, rows: Sequence[int] | None) -> None:
    faults = [1 / factor if abs(factor) > 1e-9 else float("inf") for factor in factors]
    if len(faults) == 1:
        if diagnosis.hypothesis == h.SCALED:
            return
        known = {float(ranks): " (W)", 1 / ranks: " (1/W)"}
        name = next((name for value, name in known.items() if abs(faults[0] - value) < 1e-6), "")
        what = f"{faults[0]:.6g} times{name} what it should be; the other terms are right"
        _set(diagnosis, h.TERM, f"what goes back through one collective is {what}")
        return
    shown = ", ".join(f"{fault:.6g} on rank {rank}" for rank, fault in enumerate(faults))
    what = f"what goes back through one collective has its rank's factor: {shown}"
    share = [] if rows is None or 0 in rows else [ranks * count / sum(rows) for count in rows]
    for weights in ([1 / each for each in share], share):
        if weights and all(abs(a - b) < 1e-4 for a, b in zip(weights, faults, strict=True)):
            _set(diagnosis, h.MEANS, f"{what}; that is what the share of rows {list(rows or [])} makes")
            return
    _set(diagnosis, h.TERM, what)


def _locally(mending: _Mending, trials: list[Trials]) -> list[Fit]:
    """Which hypotheses explain what one gather hands back, from what it is given on every rank."""
    found = [rank.tried[mending.at].local for rank in trials]
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
    """Where nothing that was tried mends the gradients: what is known to do such a thing."""
    missing = hypothesis in (h.SUM_MISSING, h.ZERO_GRAD, h.DROPPED, NONE_FITS)
    raw = [each for each in places if each.raw]
    forward_alone = [each for each in places if not each.raw and not each.ours and not each.back]
    both = [each for each in places if not each.raw and not each.ours and each.back]
    result = []
    if missing:
        result += [
            _suspect(each, "autograd does not follow it; use gradmesh's verb of that name", False)
            for each in raw
        ]
        result += [
            _suspect(each, "its backward calls no collective, where its forward does", False)
            for each in forward_alone
        ]
    else:
        result += [_suspect(each, "its backward calls a collective", False) for each in both]
    return result
