"""Uninitialized memory, and saved buffers that are overwritten."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gradmesh._torch import fill_fresh_memory
from gradmesh.verify.auditing.case import Case
from gradmesh.verify.auditing.checks.adjoint import notes
from gradmesh.verify.auditing.probes import Answer, Point, Probe, attempt, cotangents, leaves_of
from gradmesh.verify.auditing.readings import distance
from gradmesh.verify.auditing.report import Finding
from gradmesh.verify.auditing.subject import Subject, differentiable_call

__all__ = ["saved_buffers", "uninitialised"]


_STEP = 1e-4
"""Nonzero, so that the gradient is taken at the operands that `build` returned; the value does not matter."""


def uninitialised(case: Case) -> Iterator[Finding]:
    """Forward and backward while torch fills uninitialized memory with NaN.

    This check runs first: uninitialized values change with each call and would disturb all other checks.
    """
    probe = Probe(1, point=Point(_STEP))
    plain = case.first_order([probe])[0]
    with _filled_with_nan(case):
        ranks = case.first_order([probe])[0]
    case.line = next((answer.lines[0] for answer in ranks if answer.lines), case.line)
    yield from notes(case, [ranks])
    for name in ("results", "gradients"):
        lost: dict[int, int] = {}
        for rank, (answer, before) in enumerate(zip(ranks, plain, strict=True)):
            count = sum(map(_nans, getattr(answer, name))) - sum(map(_nans, getattr(before, name)))
            if count > 0:
                lost[rank] = count
        if lost:
            whole = sum(x.numel() for answer in ranks for x in getattr(answer, name))
            what = "result" if name == "results" else "gradient"
            text = f"{sum(lost.values())} of {whole} elements of the {what} are uninitialized memory"
            yield Finding("gradient-uninitialised", text, tuple(lost), case.line)


def _nans(x: Tensor) -> int:
    return int(torch.isnan(torch.view_as_real(x) if x.is_complex() else x).sum())


@contextlib.contextmanager
def _filled_with_nan(case: Case) -> Iterator[None]:
    """Fill uninitialized memory with NaN in process ranks and in this process, whose threads may be ranks."""
    case.pool.begin()
    before = fill_fresh_memory(True)
    case.pool.ask(fill_fresh_memory, True)
    try:
        yield
    finally:
        fill_fresh_memory(before)
        with contextlib.suppress(Exception):
            case.pool.ask(fill_fresh_memory, before)


@dataclass
class _Repeated(Answer):
    """The difference between a first and a second backward, and whether the first one's gradient changed."""

    off: float = 0.0
    changed: bool = False


def saved_buffers(case: Case) -> Iterator[Finding]:
    """Run backward twice through one graph."""
    ranks = case.answered(repeated, case.probe(31))[0]
    answers = [answer for answer in ranks if isinstance(answer, _Repeated)]
    off = tuple(rank for rank, answer in enumerate(answers) if answer.off > case.tolerance)
    if off:
        text = "a second backward with retain_graph=True gives a different gradient"
        yield Finding("saved-buffer-overwritten", text, off, case.line)
    changed = tuple(rank for rank, answer in enumerate(answers) if answer.changed)
    if changed:
        text = "a second backward writes into the gradient that the first one returned"
        yield Finding("saved-buffer-overwritten", text, changed, case.line)


def repeated(probe: Probe) -> list[Answer]:
    """Run backward twice with the same gradients."""
    return attempt([probe], _repeated)


def _repeated(subject: Subject, probe: Probe) -> Answer:
    found = _Repeated()
    leaves = [x.requires_grad_() for x in leaves_of(subject, probe)]
    with differentiable_call(subject) as backward:
        results = subject.call([leaf.clone() for leaf in leaves])
        first = backward(results, leaves, cotangents(subject, probe, results), retain_graph=True)
        kept = [None if g is None else g.clone() for g in first]
        second = backward(results, leaves, cotangents(subject, probe, results), retain_graph=True)
    for before, now, after in zip(kept, first, second, strict=True):
        if before is None or after is None or now is None:
            found.off = max(found.off, 0.0 if before is after else float("inf"))
            continue
        found.off = max(found.off, distance(before, after))
        found.changed |= not torch.equal(torch.nan_to_num(before), torch.nan_to_num(now))
    return found
