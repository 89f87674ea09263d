"""Excludes trivial readings, which hold for a map without constraining its backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from gradmesh.types import Type
from gradmesh.verify.auditing.case import Case
from gradmesh.verify.auditing.probes import Answer, tangents
from gradmesh.verify.auditing.readings import Reading, agree, distance

__all__ = ["with_a_point"]

V, P = Type.V, Type.P

_CHANGED = 8
"""The maximum number of ranks whose operands are changed one at a time."""


def with_a_point(case: Case, readings: Sequence[Reading]) -> list[Reading]:
    """The nontrivial readings.

    A result that is identical on every rank for all operands must be R or I. An operand is not R or I if other ranks'
    results depend on it and identical operands would make communication unnecessary: if rotating the operands over
    the ranks leaves the results unchanged (a sum; of identical operands it would be a multiple), or rotates them too
    (a ring; the identity), or if another rank receives all of it (a gather; copies). The same holds for gradients.
    """
    if case.pool.size == 1:
        return list(readings)
    free = tuple((False,) * len(part) for part in (case.shapes, case.out_shapes))
    ranks = case.answers[free][0]  # type: ignore[index]
    alike = [
        shape is not None and agree([a.results for a in ranks], i, case.tolerance)
        for i, shape in enumerate(case.out_shapes)
    ]
    sent = [_sent(case, ranks, i) for i in range(len(case.shapes))]
    rotated = [sends and (_rotated(case, i) or _copied(case, ranks, i)) for i, sends in enumerate(sent)]
    sent_back = [_sent_back(case, ranks, i) for i in range(len(case.out_shapes))]
    rotated_back = [sends and _rotated_back(case, i) for i, sends in enumerate(sent_back)]

    def kept(reading: Reading) -> bool:
        same, same_out = reading.pattern
        return not (
            any(one and kind in (V, P) for one, kind in zip(alike, reading.dst, strict=True))
            or any(one and other for one, other in zip(rotated, same, strict=True))
            or any(one and other for one, other in zip(rotated_back, same_out, strict=True))
        )

    return [reading for reading in readings if kept(reading)]


def _sent(case: Case, plain: Sequence[Answer], index: int) -> bool:
    """Whether other ranks' results depend on an operand."""
    some = range(min(case.pool.size, _CHANGED))
    answers = case.answered(tangents, [case.probe(1, other=rank, only=index) for rank in some])
    return _changed(plain, answers, "results", case.tolerance)


def _sent_back(case: Case, plain: Sequence[Answer], index: int) -> bool:
    """Whether other ranks' gradients depend on the gradient of a result."""
    some = range(min(case.pool.size, _CHANGED))
    answers = case.first_order([case.probe(1, other_out=rank, only=index) for rank in some])
    return _changed(plain, answers, "gradients", case.tolerance)


def _changed(
    plain: Sequence[Answer], answers: Sequence[Sequence[Answer]], what: str, tolerance: float
) -> bool:
    return any(
        distance(a, b) > 10 * tolerance
        for changed, ranks in enumerate(answers)
        for rank, (one, other) in enumerate(zip(plain, ranks, strict=True))
        if rank != changed
        for a, b in zip(getattr(one, what), getattr(other, what), strict=True)
    )


def _rotated(case: Case, index: int) -> bool:
    """Whether rotating an operand over the ranks leaves the results unchanged or rotates them too."""
    if case.shapes[index] is None:
        return False
    plain, rotated = case.probe(1), case.probe(1, rotate=1, ranks=case.pool.size, only=index)
    if not case.linear:
        values = [tuple(each.values) for each in case.pool.begin()]
        moved = [
            (*own[:index], following[index], *own[index + 1 :])
            for own, following in zip(values, values[1:] + values[:1], strict=True)
        ]
        plain = replace(plain, point=replace(case.point, rotated=tuple(values)))
        rotated = replace(rotated, point=replace(case.point, rotated=tuple(moved)))
    return _rotates("results", case.tolerance, *case.answered(tangents, [plain, rotated]))


def _rotated_back(case: Case, index: int) -> bool:
    """Whether rotating a result's gradient leaves the operands' gradients unchanged or rotates them too."""
    if case.out_shapes[index] is None:
        return False
    probes = [case.probe(1), case.probe(1, rotate_out=1, ranks=case.pool.size, only=index)]
    return _rotates("gradients", case.tolerance, *case.first_order(probes))


def _rotates(what: str, tolerance: float, plain: Sequence[Answer], rotated: Sequence[Answer]) -> bool:
    """Whether after a rotation each rank has what it had, or what the next rank had."""
    before, after = ([getattr(answer, what) for answer in answers] for answers in (plain, rotated))
    return any(
        all(
            distance(a, b) <= tolerance
            for one, other in zip(had, after, strict=True)
            for a, b in zip(one, other, strict=True)
        )
        for had in (before, before[1:] + before[:1])
    )


def _copied(case: Case, ranks: Sequence[Answer], index: int) -> bool:
    """Whether results only move elements of operands, and some rank receives all of another rank's operand."""
    if case.whole or not case.linear:
        return False
    values = torch.cat([x.reshape(-1) for answer in ranks for x in answer.operands] + [torch.zeros(1)])
    for rank, answer in enumerate(ranks):
        if not answer.results:
            continue
        got = torch.cat([y.reshape(-1) for y in answer.results])
        moved = _isin(got, values)
        for other, sender in enumerate(ranks):
            if (
                moved
                and other != rank
                and sender.operands[index].numel()
                and _isin(sender.operands[index], got)
            ):
                return True
    return False


def _isin(values: Tensor, among: Tensor) -> bool:
    return bool((values.reshape(-1, 1) == among.reshape(1, -1)).any(1).all())
