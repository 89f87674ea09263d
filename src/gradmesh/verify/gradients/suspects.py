"""The collectives most likely at fault: those of which a change, tried alone, makes every gradient right."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from gradmesh.types import Type
from gradmesh.verify.gradients import hypotheses as h
from gradmesh.verify.gradients.findings import NONE_FITS, Diagnosis, Suspect
from gradmesh.verify.gradients.judge import Slopes, slopes, tolerance
from gradmesh.verify.gradients.measure import Measured, Options
from gradmesh.verify.gradients.trials import CONJ, DOUBLE, GATHERED, PART, SUM, Found, Local, Trials

__all__ = ["suspects"]

_VAGUE = (NONE_FITS, h.SCALED, h.TERM)
"""Hypotheses that what mends the gradients may tell more of."""


def suspects(
    diagnosis: Diagnosis, trials: list[Trials], found: list[Measured], known: list[Slopes], options: Options
) -> None:
    """Add the collectives that may be at fault to a diagnosis, and what they tell of its hypothesis."""
    places = {each.place: each for rank in trials for each in rank.found}
    vectors = _Vectors(found, known, options)
    mending: list[tuple[Found, str, float]] = []
    for at, first in enumerate(trials[0].tried):
        gradients = [rank.tried[at].gradients for rank in trials]
        factor = vectors.mended(gradients, by_factor=first.how == DOUBLE)
        if factor is not None:
            mending.append((places[first.place], first.how, factor))
    # Several changes may mend them: somebody's own code is the likelier place, and the plainest change the likelier one.
    mending.sort(key=lambda each: (each[0].ours, _PLAIN.index(each[1])))
    for each, how, factor in mending:
        if all(suspect.call != each.place.text for suspect in diagnosis.suspects):
            diagnosis.suspects.append(_suspect(each, _told(how, factor, len(found)), mends=True))
    if mending and diagnosis.hypothesis in _VAGUE:
        _sharpen(diagnosis, mending[0], trials, len(found))
    if not diagnosis.suspects:
        diagnosis.suspects = _likely(diagnosis.hypothesis, list(places.values()))


_PLAIN = [DOUBLE, GATHERED, PART, SUM, CONJ]


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

    def mended(self, gradients: list[dict[str, Tensor | None]], by_factor: bool) -> float | None:
        """The factor with which a change makes every gradient right; None if there is none."""
        changed = self.changed(gradients)
        if not by_factor:
            return 1.0 if bool(((changed - self._want).abs() <= self._allowed).all()) else None
        through, owed = (changed - self.base) / self._allowed, (self._want - self.base) / self._allowed
        if float(through.abs().max()) < 1:
            return None
        x = float((through @ owed) / (through @ through))
        fits = bool(((owed - x * through).abs() <= max(1.0, abs(x))).all())
        return 1 + x if fits else None


def _told(how: str, factor: float, ranks: int) -> str:
    if how == DOUBLE:
        names = {float(ranks): "the number of ranks", 1 / ranks: f"1/{ranks}, of {ranks} ranks"}
        known = next((f" ({name})" for value, name in names.items() if abs(factor - value) < 1e-6), "")
        return f"with {factor:.6g} times the gradient that it hands back{known}, every gradient is right"
    what = "what arrives at its result" if how == GATHERED else "the gradient that it hands back"
    return f"with {what} {how}, every gradient is right"


def _suspect(found: Found, why: str, mends: bool) -> Suspect:
    inside = f"; inside: {', '.join(found.inside)}" if found.inside else ""
    return Suspect(found.place.text, why + inside, mends)


def _sharpen(diagnosis: Diagnosis, best: tuple[Found, str, float], trials: list[Trials], ranks: int) -> None:
    """Replace a vague hypothesis by what the change that mends the gradients says."""
    _, how, factor = best
    if how == DOUBLE:
        fault = 1 / factor if abs(factor) > 1e-9 else float("inf")
        if diagnosis.hypothesis in (h.SCALED,):
            return
        times = f"{fault:.6g} times" + (
            " (W)" if abs(fault - ranks) < 1e-6 else " (1/W)" if abs(fault * ranks - 1) < 1e-6 else ""
        )
        diagnosis.hypothesis = h.TERM
        diagnosis.text = (
            f"what goes back through one collective is {times} what it should be; the other terms are right"
        )
        return
    local = _locally(best, trials) if how == PART else None
    if local is not None:
        diagnosis.hypothesis = h.TERM if local.name in (h.TIMES_W, h.UNDER_W, h.SCALED) else local.name
        diagnosis.text = f"of one collective, {local.text}"
        return
    diagnosis.hypothesis = {SUM: h.SUM_MISSING, GATHERED: h.SUM_MISSING, CONJ: h.CONJUGATE}.get(
        how, NONE_FITS
    )
    diagnosis.text = f"where one collective's gradient is {how}, every gradient is right"


def _locally(best: tuple[Found, str, float], trials: list[Trials]) -> h.Fit | None:
    """Which hypothesis explains what one gather hands back, from what it is given on every rank."""
    for at, tried in enumerate(trials[0].tried):
        if (tried.place, tried.how) != (best[0].place, best[1]):
            continue
        cases = []
        for rank, each in enumerate(trials):
            local = each.tried[at].local
            if local is None:
                return None
            got, want = _flat(local.got), _flat(local.want)
            terms = torch.stack([_flat(term) for term in local.terms])
            allowed = 1e-9 * (1 + terms.abs().sum(0))
            conjugate = _flat(local.got.conj()) if local.got.is_complex() else None
            cases.append(h.Case("", Type.V, rank, got, conjugate, want, terms, allowed))
        fits = h.fits(
            cases, len(trials), [len(each.got) if each.got.dim() else 1 for each in _locals(trials, at)]
        )
        return fits[0] if fits else None
    return None


def _locals(trials: list[Trials], at: int) -> list[Local]:
    return [local for rank in trials if (local := rank.tried[at].local) is not None]


def _flat(x: Tensor) -> Tensor:
    return (torch.view_as_real(x.resolve_conj()) if x.is_complex() else x).reshape(-1).double()


def _likely(hypothesis: str, places: list[Found]) -> list[Suspect]:
    """Where nothing that was tried mends the gradients: what is known to do such a thing."""
    missing = hypothesis in (h.SUM_MISSING, h.NOTHING, h.DROPPED, NONE_FITS)
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
