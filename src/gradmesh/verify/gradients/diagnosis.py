"""Explains wrong gradients: tests hypotheses on the values, and modifies collectives to see which change fixes them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gradmesh.errors import RankError
from gradmesh.types import Type
from gradmesh.verify.gradients import hypotheses as h
from gradmesh.verify.gradients.cases import Case
from gradmesh.verify.gradients.comparisons import Slopes, entries, slopes, tolerance
from gradmesh.verify.gradients.findings import NONE_FITS, Diagnosis
from gradmesh.verify.gradients.measure import Measured, Options, measure
from gradmesh.verify.gradients.program import inner
from gradmesh.verify.gradients.suspects import suspects
from gradmesh.verify.gradients.trials import Trials, investigate

__all__ = ["cases", "diagnosed"]

_DIRECTIONS = 6


def diagnosed(
    run: Callable[..., list[Any]],
    fn: Callable[..., Tensor],
    inputs: Callable[[int], object],
    options: Options,
) -> Diagnosis:
    """Explain why first-order gradients are wrong.

    Args:
        run: runs a function on every rank.
        fn: the program.
        inputs: returns each rank's inputs.
        options: the options of the failed check.
    """
    split = options.objective != "replicated"
    closer = dataclasses.replace(
        options, order=1, forward=False, split=split, directions=max(_DIRECTIONS, options.directions)
    )
    found: list[Measured] = run(measure, fn, inputs, closer)
    known = slopes(found, closer)
    every = cases(found, known, closer)
    wrong = [case for case in every if not case.right]
    fits = h.fits(every, len(found), _rows(found))
    diagnosis = Diagnosis(NONE_FITS, "no hypothesis predicts these gradients")
    if not wrong:
        return Diagnosis(NONE_FITS, "the gradients are correct when measured along more directions")
    if fits:
        diagnosis = Diagnosis(
            fits[0].name, fits[0].text, also=[f"{fit.name} ({fit.text})" for fit in fits[1:]]
        )
    elif _smooth_alone(run, fn, inputs, options):
        diagnosis = Diagnosis(
            h.PRECISION,
            "the gradients are correct to three digits only, so part of the program computes in a lower precision "
            "than float64",
        )
    diagnosis.names = list(dict.fromkeys(case.name for case in wrong))
    diagnosis.ranks = sorted({case.rank for case in wrong})

    def tried(one_by_one: bool) -> list[Trials]:
        return run(investigate, fn, inputs, closer, one_by_one)

    try:
        suspects(diagnosis, tried, found, known, closer, _rows(found))
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
                    conjugate=_conjugate(grad, slope, options),
                    want=slope.total,
                    terms=slope.by_rank if options.objective != "replicated" else None,
                    allowed=tolerance(slope, options),
                )
            )
    return result


def _conjugate(grad: Tensor | None, slope: Slopes, options: Options) -> Tensor | None:
    move = slope.move
    if not move.dtype.is_complex or move.count == 0:
        return None
    if grad is None:
        return torch.zeros(move.count, dtype=torch.float64)
    return torch.stack([inner(grad.conj(), move.along(n, options.seed)).double() for n in range(move.count)])


def _rows(found: list[Measured]) -> Sequence[int] | None:
    """Each rank's number of rows: the sizes along dim 0 of the first varying leaf where they differ."""
    for name in found[0].leaves:
        kept = [rank.leaves.get(name) for rank in found]
        rows = [each.shape[0] for each in kept if each is not None and each.type is Type.V and each.shape]
        if len(rows) == len(found) and len(set(rows)) > 1:
            return rows
    return None


def _smooth_alone(
    run: Callable[..., list[Any]],
    fn: Callable[..., Tensor],
    inputs: Callable[[int], object],
    options: Options,
) -> bool:
    """Whether the gradients are correct with a much larger step and tolerance."""
    coarse = dataclasses.replace(options, order=1, forward=False, eps=1e-3, rtol=1e-3, atol=1e-3)
    return all(entry.ok for entry in entries(run(measure, fn, inputs, coarse), coarse))
