"""Whether backward is the adjoint, under which readings, and otherwise by which factor it is wrong."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from gradmesh.errors import ArgumentError, message
from gradmesh.types import Type
from gradmesh.verify.auditing.case import Case, FunctionRaisedError, patterns_of
from gradmesh.verify.auditing.checks.vacuous import with_a_point
from gradmesh.verify.auditing.pool import RanksLostError
from gradmesh.verify.auditing.probes import Answer
from gradmesh.verify.auditing.readings import (
    Pairings,
    Pattern,
    Reading,
    all_readings,
    all_tried,
    law_error,
    named,
    paired,
    strongest,
    usual,
    usual_of_name,
)
from gradmesh.verify.auditing.report import Finding

__all__ = ["adjoint", "ask_all", "holding_readings", "notes"]

_PROBES = 3
"""Probes per pattern; `by_rank` needs more."""

_SORTED = 1024
"""The maximum number of readings to sort, because sorting compares all pairs."""

Answers = Mapping[Pattern, Sequence[Sequence[Answer]]]


def adjoint(case: Case) -> Iterator[Finding]:
    """The first-order law on random operands of every type; stores answers, readings and arrows in the case."""
    every_reading = readings = all_readings(case.shapes, case.out_shapes)
    try:
        case.answers = ask_all(case, readings)
        readings = with_a_point(case, readings)
    except (FunctionRaisedError, RanksLostError) as error:
        stage = next(iter(error.failures.values())).stage if isinstance(error, FunctionRaisedError) else ""
        hung = isinstance(error, FunctionRaisedError) and all(
            failure.waited for failure in error.failures.values()
        )
        kind = error.kind if isinstance(error, RanksLostError) else "hangs" if hung else "backward-raises"
        yield case.failure(kind, error, f"on a contiguous {'gradient' if stage == 'backward' else 'operand'}")
        return
    every = [answer for probes in case.answers.values() for ranks in probes for answer in ranks]
    lines = list(dict.fromkeys(line for answer in every for line in answer.lines))
    case.line = lines[0] if lines else case.forward_line
    yield from notes(case, (ranks for probes in case.answers.values() for ranks in probes))
    case.arrows = strongest(holding_readings(case, readings, case.answers))
    case.readings = [r for r in every_reading if any(arrow.implies(r) for arrow in case.arrows)]
    if case.arrow is not None:
        yield from _meant(case, case.arrow)
    elif not case.readings and not all_tried(case.shapes, case.out_shapes):
        count = len(case.shapes) + len(case.out_shapes)
        case.left_out["not-adjoint"] = f"{count} tensors have too many combinations of types to try"
    elif not case.readings:
        text, ranks, line = _why(case, readings, case.answers)
        yield Finding("not-adjoint", text + _but(case, every_reading), ranks, line)
    elif case.pool.size > 1:
        yield from _unusual(case)


def _meant(case: Case, arrow: str) -> Iterator[Finding]:
    """The law under the requested reading."""
    reading = named(arrow, len(case.shapes), len(case.out_shapes))
    if reading is None:
        raise ArgumentError(
            message(
                "invalid arrow for this function",
                op="verify.audit",
                expected=f"types V, R, P or I of {len(case.shapes)} operands and {len(case.out_shapes)} results, "
                "or one for all",
                got=repr(arrow),
                remedy='pass the intended types, e.g. arrow="V -> R"',
            )
        )
    differing = [
        f"{what} {index}"
        for what, kinds, sizes in (
            ("operand", reading.src, case.shapes),
            ("result", reading.dst, case.out_shapes),
        )
        for index, (kind, shape) in enumerate(zip(kinds, sizes, strict=True))
        if shape is None and kind is not Type.V
    ]
    if differing:
        text = f"as {reading} (requested): the shape of {', '.join(differing)} differs between ranks, so its type is V"
        yield Finding("not-adjoint", text, (), case.forward_line)
        return
    answers = dict(case.answers)
    if reading.pattern not in answers:
        answers |= ask_all(case, [reading])
    if holding_readings(case, [reading], answers):
        case.readings = list(dict.fromkeys([*case.readings, reading]))
        case.assumes = _assumed([reading])
        return
    text, ranks, line = _why(case, [reading], answers)
    others = f"; it is the adjoint as {_names(case.arrows)}" if case.arrows else ""
    asked = "" if f"as {reading}" in text else f"as {reading} (requested): "
    yield Finding("not-adjoint", f"{asked}{text}{others}", ranks, line)


def _unusual(case: Case) -> Iterator[Finding]:
    """Warn if all readings that hold are unusual for such a function."""
    plain = [reading for reading in case.arrows if usual(reading) or _kept_at_one(case, reading)]
    if not plain:
        text = f"backward is the adjoint only as {_names(case.arrows)}, which is rarely intended"
        yield Finding("unusual-reading", text, (), case.line)
        return
    case.assumes = _assumed(plain)
    wanted = usual_of_name(case.name) if case.linear and len(case.shapes) == 1 else ()
    if wanted and not {str(reading) for reading in case.readings} & {
        str(named(arrow, 1, len(case.out_shapes))) for arrow in wanted
    }:
        text = (
            f"the name {case.name} suggests {' or '.join(wanted)}; backward is the adjoint only as "
            f"{_names(case.arrows)}"
        )
        yield Finding("unusual-reading", text, (), case.line)


def _kept_at_one(case: Case, reading: Reading) -> bool:
    """Whether only one rank keeps the value: results of I -> P, or gradients of R -> I, are zero on all others."""
    if (set(reading.src), set(reading.dst)) not in (({Type.I}, {Type.P}), ({Type.R}, {Type.I})):
        return False
    what = "results" if Type.P in reading.dst else "gradients"
    return all(
        sum(any(bool(x.any()) for x in getattr(answer, what)) for answer in ranks) <= 1
        for ranks in case.answers[reading.pattern]
    )


def _assumed(readings: Sequence[Reading]) -> tuple[str, ...]:
    """The caller's obligation: identical losses on every rank, if all of these readings require them."""
    if not readings or any(Type.I not in reading.dst for reading in readings):
        return ()
    summed = Reading(readings[0].src, tuple(Type.R if kind is Type.I else kind for kind in readings[0].dst))
    verbs = {"V -> I": "gm.all_gather(x)", "P -> I": "gm.all_reduce(x, dst=gm.R)"}
    verb = next((verbs[name] for name in map(str, readings) if name in verbs), None)
    return (
        f"as {_names(readings)} the gradient is right only if all ranks compute the same loss from the result, and "
        "wrong for rank-local losses, because it omits the losses of the other ranks; if the ranks' losses differ, "
        f"backward must sum their gradients: {summed}" + (f", as {verb} does" if verb else ""),
    )


def _names(readings: Sequence[Reading]) -> str:
    return " or ".join(map(str, readings))


def ask_all(
    case: Case, readings: Sequence[Reading], seed: int = 1, **changes: object
) -> dict[Pattern, list[list[Answer]]]:
    """First-order answers for every pattern that the readings need.

    Raises:
        FunctionRaisedError: a rank raised.
        RanksLostError: a rank died or timed out.
    """
    patterns = list(patterns_of(readings))
    probes = [case.probe(seed + n, pattern, **changes) for pattern in patterns for n in range(_PROBES)]
    answers = case.first_order(probes)
    return {p: answers[i * _PROBES : (i + 1) * _PROBES] for i, p in enumerate(patterns)}


def holding_readings(case: Case, readings: Sequence[Reading], answers: Answers) -> list[Reading]:
    """The readings that hold."""
    return [r for r, error in _errors(case, readings, answers) if error <= case.tolerance]


def _errors(case: Case, readings: Sequence[Reading], answers: Answers) -> list[tuple[Reading, float]]:
    """The error of backward as an adjoint under each reading."""
    paired_once = {p: Pairings(answers[p], case.tolerance) for p in patterns_of(readings)}
    return [(r, paired_once[r.pattern].error(r)) for r in readings]


def notes(case: Case, probes: Iterable[Sequence[Answer]]) -> Iterator[Finding]:
    """Findings of forbidden writes and shared memory, each once with all of its ranks."""
    seen: dict[tuple[str, str, str | None], set[int]] = {}
    for ranks in probes:
        for rank, answer in enumerate(ranks):
            for note in answer.notes:
                seen.setdefault(note, set()).add(rank)
    for (kind, text, line), ranks_of in seen.items():
        yield Finding(kind, text, tuple(sorted(ranks_of)), line or case.line)


def _but(case: Case, readings: Sequence[Reading]) -> str:
    """Name a reading under which it is correct, but which was excluded because it makes the collective unnecessary."""
    same_gradients = [r for r in holding_readings(case, readings, case.answers) if any(r.pattern[1])]
    if not same_gradients:
        return ""
    return f"; correct as {strongest(same_gradients)[0]}, where gradients are equal on every rank and need no reduction"


def _why(
    case: Case, readings: Sequence[Reading], answers: Answers
) -> tuple[str, tuple[int, ...], str | None]:
    """What is wrong with a backward that is not an adjoint: a factor that explains the values, or the error."""
    world = case.pool.size
    every = [ranks for probes in answers.values() for ranks in probes]
    without = [rank for rank in range(world) if not any(ranks[rank].reached for ranks in every)]
    if len(without) == world:
        return "backward returns no gradient on any rank", (), case.forward_line
    for reading in _from_the_strongest(readings):
        factor = _factor(reading, answers[reading.pattern], case.tolerance)
        if factor is not None:
            return f"the gradient is {_named(factor, world)} as {reading}", (), case.line
    if without:
        return f"backward returns no gradient on {len(without)} of {world} ranks", tuple(without), case.line
    nearest, error = min(_errors(case, readings, answers), key=lambda pair: pair[1])
    if math.isinf(error):
        return (
            "no reading fits: results or gradients differ between ranks where the types require equal values",
            (),
            case.line,
        )
    which = "the error is" if len(readings) == 1 else f"under the closest reading, {nearest}, the error is"
    return f"the gradient is not a multiple of the correct one; {which} {error:.0%}", (), case.line


def _from_the_strongest(readings: Sequence[Reading]) -> list[Reading]:
    if len(readings) > _SORTED:
        return list(readings)
    return sorted(readings, key=lambda r: -sum(r.implies(other) for other in readings))


def _factor(reading: Reading, probes: Sequence[Sequence[Answer]], tolerance: float) -> float | None:
    """The factor of the gradient relative to the correct one, if it is the same in every probe."""
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
    """Whether values and gradients have their types, up to a factor."""
    return not math.isinf(law_error(reading, {reading.pattern: probes}, tolerance))


def _named(factor: float, world: int) -> str:
    names = {float(world): f"W = {world} times too large", 1 / world: f"too small by W = {world}"}
    for value, name in names.items():
        if math.isclose(factor, value, rel_tol=1e-6):
            return name
    if factor < 0:
        return f"{factor:.4g} times the correct one"
    return f"{factor:.4g} times too large" if factor > 1 else f"too small by {1 / factor:.4g}"


def by_rank(reading: Reading, probes: Sequence[Sequence[Answer]], tolerance: float) -> list[float] | None:
    """Each rank's factor relative to the correct gradient, if the factors are the same in every probe.

    Needs at least two more probes than ranks.
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
