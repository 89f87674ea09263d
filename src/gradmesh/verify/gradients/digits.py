"""Repeats comparisons that are hidden by the rounding of a large loss, with larger steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from gradmesh.errors import RankError
from gradmesh.verify.gradients.comparisons import entries
from gradmesh.verify.gradients.measure import Measured, Options
from gradmesh.verify.gradients.report import Entry

__all__ = ["refined", "widest"]

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

    Args:
        every: the comparisons of a check.
        measured: measures on every rank.
        options: the options of the check.
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
