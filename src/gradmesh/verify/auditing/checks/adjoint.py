"""Whether backward is the adjoint, under which readings, and by which factor it is off where it is not."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from gradmesh.types import Type
from gradmesh.verify.auditing.case import Case, Refused, patterns_of
from gradmesh.verify.auditing.pool import Lost
from gradmesh.verify.auditing.probes import Answer, tangents
from gradmesh.verify.auditing.readings import (
    Pattern,
    Reading,
    agree,
    all_readings,
    distance,
    law_error,
    paired,
    strongest,
)
from gradmesh.verify.auditing.report import Finding

__all__ = ["adjoint", "ask_all", "judge"]

V, R, P = Type.V, Type.R, Type.P

_PROBES = 3
"""For each pattern; a factor for each rank takes more, see `_by_rank`."""

Answers = Mapping[Pattern, Sequence[Sequence[Answer]]]


def adjoint(case: Case) -> Iterator[Finding]:
    """The first-order law, on drawn operands of every type; writes answers, readings and arrows into the case."""
    every_reading = readings = all_readings(case.shapes, case.out_shapes)
    try:
        case.answers = ask_all(case, readings)
        readings = _with_a_point(case, readings)
    except (Refused, Lost) as error:
        stage = next(iter(error.troubles.values())).stage if isinstance(error, Refused) else ""
        hung = isinstance(error, Refused) and all(trouble.waited for trouble in error.troubles.values())
        kind = error.kind if isinstance(error, Lost) else "hangs" if hung else "backward-raises"
        yield case.refused(kind, error, f"on a plain {'gradient' if stage == 'backward' else 'operand'}")
        return
    every = [answer for probes in case.answers.values() for ranks in probes for answer in ranks]
    lines = list(dict.fromkeys(line for answer in every for line in answer.lines))
    case.line = lines[0] if lines else case.forward_line
    yield from _notes(case)
    case.arrows = strongest(judge(case, readings, case.answers))
    case.readings = [r for r in every_reading if any(arrow.implies(r) for arrow in case.arrows)]
    if not case.readings:
        yield Finding("not-adjoint", *_why(case, readings, case.answers))


def ask_all(
    case: Case, readings: Sequence[Reading], seed: int = 1, **changes: object
) -> dict[Pattern, list[list[Answer]]]:
    """First-order answers for every pattern that the readings need.

    Raises:
        Refused: a rank raised.
        Lost: the ranks did not come back.
    """
    patterns = list(patterns_of(readings))
    probes = [case.probe(seed + n, pattern, **changes) for pattern in patterns for n in range(_PROBES)]
    answers = case.first_order(probes)
    return {p: answers[i * _PROBES : (i + 1) * _PROBES] for i, p in enumerate(patterns)}


def judge(case: Case, readings: Sequence[Reading], answers: Answers) -> list[Reading]:
    """The readings that hold."""
    return [r for r in readings if law_error(r, answers, case.tolerance) <= case.tolerance]


def _with_a_point(case: Case, readings: Sequence[Reading]) -> list[Reading]:
    """The readings that are not vacuous.

    A result that is the same on every rank whatever the operands is R or I. An operand that other ranks' results
    depend on is neither R nor I: of equal ones nothing would have to be sent, and permutations of ranks would be right
    both ways round. A gradient that other ranks' gradients depend on is not that of a P result; where gradients can
    change places and nothing changes, as in a sum, it is that of no I either: of equal ones that would be a multiple.
    """
    size = case.pool.size
    if size == 1:
        return list(readings)
    free = tuple((False,) * len(part) for part in (case.shapes, case.out_shapes))
    ranks = case.answers[free][0]  # type: ignore[index]
    alike = [
        shape is not None and agree([a.results for a in ranks], i, case.tolerance)
        for i, shape in enumerate(case.out_shapes)
    ]
    sends, sends_back = _sends(case, ranks)
    forward, backward = _symmetric(case)

    def kept(reading: Reading) -> bool:
        same, same_out = reading.pattern
        return not (
            any(one and kind in (V, P) for one, kind in zip(alike, reading.dst, strict=True))
            or (sends and any(same))
            or (sends_back and P in reading.dst)
            or (forward and any(same))
            or (backward and any(same_out))
        )

    return [reading for reading in readings if kept(reading)]


_CHANGED = 8
"""Ranks whose operands are changed one by one, at most."""


def _sends(case: Case, plain: Sequence[Answer]) -> tuple[bool, bool]:
    """Whether a rank's results depend on other ranks' operands, and its gradients on those of others' results."""
    some = range(min(case.pool.size, _CHANGED))
    probes = [case.probe(1, other=rank) for rank in some] + [case.probe(1, other_out=rank) for rank in some]
    answers = case.first_order(probes)
    sends = [False, False]
    for index, ranks in enumerate(answers):
        changed, back = index % len(some), index >= len(some)
        what = "gradients" if back else "results"
        for rank, (one, other) in enumerate(zip(plain, ranks, strict=True)):
            pairs = zip(getattr(one, what), getattr(other, what), strict=True)
            if rank != changed and any(distance(a, b) > 10 * case.tolerance for a, b in pairs):
                sends[back] = True
    return sends[0], sends[1]


def _symmetric(case: Case) -> tuple[bool, bool]:
    """Whether results stay when the ranks' operands change places, and gradients when those of the results do."""
    forward = backward = False
    size = case.pool.size
    if None not in case.shapes:
        turned = case.probe(1, turn=1, ranks=size)
        plain = case.probe(1)
        if not case.linear:
            values = [tuple(told.values) for told in case.pool.begin()]
            plain = replace(plain, point=replace(case.point, turned=tuple(values)))
            turned = replace(turned, point=replace(case.point, turned=tuple(values[1:] + values[:1])))
        forward = _equal("results", case.tolerance, *case.answered(tangents, [plain, turned]))
    if None not in case.out_shapes:
        answers = case.first_order([case.probe(1), case.probe(1, turn_out=1, ranks=size)])
        backward = _equal("gradients", case.tolerance, *answers)
    return forward, backward


def _equal(what: str, tolerance: float, plain: Sequence[Answer], turned: Sequence[Answer]) -> bool:
    pairs = [
        (a, b)
        for one, other in zip(plain, turned, strict=True)
        for a, b in zip(getattr(one, what), getattr(other, what), strict=True)
    ]
    return all(distance(a, b) <= tolerance for a, b in pairs) and any(
        bool(a.abs().max() > 0) for a, _ in pairs if a.numel()
    )


def _notes(case: Case) -> Iterator[Finding]:
    """What was written that may not be, and what shares memory: each once, with all ranks that saw it."""
    seen: dict[tuple[str, str, str | None], set[int]] = {}
    for probes in case.answers.values():
        for ranks in probes:
            for rank, answer in enumerate(ranks):
                for note in answer.notes:
                    seen.setdefault(note, set()).add(rank)
    for (kind, text, line), ranks_of in seen.items():
        yield Finding(kind, text, tuple(sorted(ranks_of)), line or case.line)


def _why(
    case: Case, readings: Sequence[Reading], answers: Answers
) -> tuple[str, tuple[int, ...], str | None]:
    """What is wrong with a backward that is no adjoint: a factor that was tried on the numbers, or the distance."""
    world = case.pool.size
    every = [ranks for probes in answers.values() for ranks in probes]
    deaf = [rank for rank in range(world) if not any(ranks[rank].reached for ranks in every)]
    if len(deaf) == world:
        return "no gradient comes back on any rank", (), case.forward_line
    for reading in _from_the_strongest(readings):
        factor = _factor(reading, answers[reading.pattern], case.tolerance)
        if factor is not None:
            return f"the gradient is {_named(factor, world)} as {reading}", (), case.line
    if deaf:
        return f"no gradient comes back on {len(deaf)} of {world} ranks", tuple(deaf), case.line
    errors = [(law_error(r, answers, case.tolerance), r) for r in readings]
    error, nearest = min(errors, key=lambda pair: pair[0])
    if math.isinf(error):
        return (
            "no reading fits: results or gradients differ between ranks where types ask for one value",
            (),
            case.line,
        )
    return f"no factor explains it; the nearest reading is {nearest}, off by {error:.0%}", (), case.line


def _from_the_strongest(readings: Sequence[Reading]) -> list[Reading]:
    return sorted(readings, key=lambda r: -sum(r.implies(other) for other in readings))


def _factor(reading: Reading, probes: Sequence[Sequence[Answer]], tolerance: float) -> float | None:
    """By what the gradient is too large, if one factor explains every probe."""
    pairs = []
    for ranks in probes:
        results, grads = [a.results for a in ranks], [a.gradients for a in ranks]
        pairs.append(
            (
                paired(reading.dst, results, [a.cotangents for a in ranks]),
                paired(reading.src, [a.operands for a in ranks], grads),
            )
        )
    right, left = pairs[0][1][0], pairs[0][0][0]
    if abs(left) < 1e-12 or abs(right) < 1e-12:
        return None
    factor = right / left
    scaled = [
        abs(r / factor - lft) / max(1e-300, size, other / abs(factor)) for (lft, size), (r, other) in pairs
    ]
    return factor if max(scaled) <= 10 * tolerance and _typed(reading, probes, tolerance) else None


def _typed(reading: Reading, probes: Sequence[Sequence[Answer]], tolerance: float) -> bool:
    """Whether values and gradients are of their types, whatever the factor."""
    return not math.isinf(law_error(reading, {reading.pattern: probes}, tolerance))


def _named(factor: float, world: int) -> str:
    names = {float(world): f"W = {world} times too large", 1 / world: f"too small by W = {world}"}
    for value, name in names.items():
        if math.isclose(factor, value, rel_tol=1e-6):
            return name
    if factor < 0:
        return f"{factor:.4g} times what it should be"
    return f"{factor:.4g} times too large" if factor > 1 else f"too small by {1 / factor:.4g}"


def by_rank(reading: Reading, probes: Sequence[Sequence[Answer]], tolerance: float) -> list[float] | None:
    """By what each rank's gradient is too large, if one factor for each rank explains every probe.

    It takes two probes more than ranks.
    """
    rows, wanted = [], []
    for ranks in probes:
        wanted.append(paired(reading.dst, [a.results for a in ranks], [a.cotangents for a in ranks])[0])
        rows.append([paired(reading.src, [a.operands], [a.gradients])[0] for a in ranks])
    if len(rows) < len(rows[0]) + 2:
        return None
    matrix, vector = torch.tensor(rows, dtype=torch.float64), torch.tensor(wanted, dtype=torch.float64)
    found = torch.linalg.lstsq(matrix, vector).solution
    off = float((matrix @ found - vector).abs().max() / vector.abs().max().clamp_min(1e-300))
    if off > max(1e-8, 100 * tolerance) or bool((found.abs() < 1e-12).any()):
        return None
    return [1 / float(f) for f in found]
