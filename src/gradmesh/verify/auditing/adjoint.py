"""Whether backward is the adjoint, under which readings, and otherwise by which factor it is wrong.

Readings that hold trivially, without constraining backward, are excluded. Also second-order gradients (the gradient of
a linear map is its adjoint applied to the cotangent, and differentiating that gives the map again), and the first-order
law with uneven and empty shards.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from gradmesh.errors import ArgumentError, RankError, message
from gradmesh.types import Type
from gradmesh.verify.auditing.findings import Finding
from gradmesh.verify.auditing.opening import shapes
from gradmesh.verify.auditing.probes import (
    Case,
    FunctionRaisedError,
    Point,
    Probe,
    RanksLostError,
    cotangents,
    forward_only,
    leaves_of,
    mapped,
    patterns_of,
    worst_failure,
)
from gradmesh.verify.auditing.readings import (
    Answer,
    Pairings,
    Pattern,
    Reading,
    agree,
    all_readings,
    all_tried,
    distance,
    law_error,
    named,
    paired,
    strongest,
    usual,
    usual_of_name,
)
from gradmesh.verify.auditing.subject import IN_BACKWARD, Subject, differentiable_call

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
    answers = case.answered(forward_only, [case.probe(1, other=rank, only=index) for rank in some])
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
    return _rotates("results", case.tolerance, *case.answered(forward_only, [plain, rotated]))


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


KINDS_OF = ("second-order-raises", "second-order-wrong", "second-order-lost")
"""The kinds that this check reports."""


@dataclass
class _Second(Answer):
    """The outcome of double backward.

    `operands` are directions u, `results` is A u, and `back` is the gradient of <A* y, u> with respect to y.
    """

    back: list[Tensor] = field(default_factory=list)
    kept: bool = False
    arrived: bool = False


def second_order(case: Case) -> Iterator[Finding]:
    """The second-order law; must hold under one of the readings that hold in first order."""
    worst: Finding | None = None
    if not case.arrows:
        case.left_out |= dict.fromkeys(KINDS_OF, "backward is not an adjoint in first order")
    for arrow in case.arrows:
        try:
            ranks = case.answered(_second, [case.probe(41 + n, arrow.pattern) for n in range(2)])
        except (FunctionRaisedError, RanksLostError) as error:
            first = worst_failure(error.failures) if isinstance(error, FunctionRaisedError) else None
            if first is not None and first.stage == "forward" and not first.waited:
                case.left_out |= dict.fromkeys(KINDS_OF, f"forward raises there: {first.first}")
                return
            worst = worst or case.failure("second-order-raises", error, "under create_graph=True")
            continue
        found = _check_reading(case, arrow, [[a for a in row if isinstance(a, _Second)] for row in ranks])
        if found is None:
            return
        worst = found if worst is None or worst.kind == "second-order-raises" else worst
    if worst is not None:
        yield worst


def _check_reading(case: Case, arrow: Reading, probes: Sequence[Sequence[_Second]]) -> Finding | None:
    every = [answer for ranks in probes for answer in ranks]
    if all(_zero(answer.results) for answer in every):
        return None
    if not any(answer.arrived for answer in every):
        what = (
            "has no graph"
            if not any(answer.kept for answer in every)
            else "does not depend on the incoming gradient"
        )
        return Finding("second-order-lost", f"the gradient {what}, as {arrow}", (), case.line)
    off: dict[int, float] = {}
    for ranks in probes:
        back, wanted = [a.back for a in ranks], [a.results for a in ranks]
        for index, kind in enumerate(arrow.dst):
            if kind in (Type.R, Type.I) and not agree(back, index, case.tolerance):
                off[0] = max(off.get(0, 0.0), 1.0)
            if kind is Type.P:
                total = [sum((row[index] for row in rows), torch.zeros(())) for rows in (back, wanted)]
                error = distance(*total)
                if error > case.tolerance:
                    off[0] = max(off.get(0, 0.0), error)
                continue
            for rank, (got, want) in enumerate(zip(back, wanted, strict=True)):
                error = distance(got[index], want[index])
                if error > case.tolerance:
                    off[rank] = max(off.get(rank, 0.0), error)
    if not off:
        return None
    dead = [rank for rank in range(len(probes[0])) if not any(ranks[rank].arrived for ranks in probes)]
    if dead and all(_zero(ranks[rank].back) for rank in dead for ranks in probes) and set(off) <= set(dead):
        return Finding(
            "second-order-lost",
            f"on some ranks the gradient is not differentiable, as {arrow}",
            tuple(dead),
            case.line,
        )
    text = f"the second-order gradient has an error of {max(off.values()):.0%}, as {arrow}"
    return Finding("second-order-wrong", text, tuple(sorted(off)), case.line)


def _zero(tensors: Sequence[Tensor]) -> bool:
    return all(not t.numel() or float(t.abs().max()) == 0.0 for t in tensors)


def _second(subject: Subject, probe: Probe) -> Answer:
    """Run double backward with respect to the incoming gradient."""
    u, image = mapped(subject, probe)
    found = _Second(operands=u, results=image)
    leaves = [x.requires_grad_() for x in leaves_of(subject, probe)]
    with differentiable_call(subject) as backward:
        results = subject.call([leaf.clone() for leaf in leaves])
        y = [c.requires_grad_() for c in cotangents(subject, probe, results)]
        handed = [c.clone() for c in y]  # not leaves, because torch forbids in-place writes into leaves
        grads = backward(results, leaves, handed, create_graph=True)
        pairs = [(g, v) for g, v in zip(grads, u, strict=True) if g is not None and g.requires_grad]
        found.kept = bool(pairs)
        back: list[Tensor | None] = [None] * len(y)
        if subject.ordered:
            back = backward([g for g, _ in pairs], y, [v.clone() for _, v in pairs])
        elif pairs:
            # backward() and not grad(..., y): the error node of once_differentiable is not on a path to y.
            try:
                torch.autograd.backward([g for g, _ in pairs], [v.clone() for _, v in pairs])
            except Exception as error:
                error.add_note(IN_BACKWARD)
                raise
            back = [c.grad for c in y]
    found.arrived = any(g is not None and bool(g.abs().max() > 0) for g in back if g is None or g.numel())
    found.back = [
        torch.zeros_like(c) if g is None else g.detach().clone() for g, c in zip(back, y, strict=True)
    ]
    return found


def parts(case: Case) -> Iterator[Finding]:
    """The first-order law with other sizes, which are passed to `build` as `parts=`."""
    if not case.pool.accepts("parts"):
        case.left_out |= dict.fromkeys(("uneven-parts", "empty-part"), "build does not accept parts=")
        return
    size = case.pool.size
    ways = {
        "uneven-parts": [tuple((3, 1, 2)[rank % 3] for rank in range(size))],
        "empty-part": [tuple((2, 0, 3)[(rank + offset) % 3] for rank in range(size)) for offset in (0, 1)],
    }
    for kind, ways_of in ways.items():
        for sizes in ways_of:
            with case.pool.built_with(parts=sizes):
                found = _one(case, kind, sizes)
            if found is not None:
                yield found
                break


def _one(case: Case, kind: str, sizes: Sequence[int]) -> Finding | None:
    what = f"with {', '.join(map(str, sizes))} rows"
    uneven = Case(
        case.pool, case.linear, case.tolerance, case.whole, line=case.line, forward_line=case.forward_line
    )
    uneven.point = case.point if case.linear else Point(case.point.step)
    try:
        shapes(uneven)
        readings = all_readings(uneven.shapes, uneven.out_shapes)
        answers = ask_all(uneven, readings)
        holding = holding_readings(uneven, readings, answers)
        meant = None if case.arrow is None else named(case.arrow, len(uneven.shapes), len(uneven.out_shapes))
        arrows = case.arrows if meant is None or meant not in case.readings else [meant]
        if not arrows or any(arrow.implies(r) or arrow == r for arrow in arrows for r in holding):
            return None
        wanted = [r for r in readings if any(arrow.implies(r) or arrow == r for arrow in arrows)]
        wanted = sorted(wanted, key=lambda r: -sum(r.implies(other) for other in wanted))
        error = min((law_error(r, answers, case.tolerance) for r in wanted), default=math.inf)
        if not wanted:
            return None
        pattern = wanted[0].pattern
        more = uneven.first_order([uneven.probe(300 + n, pattern) for n in range(len(sizes) + 3)])
        factors = by_rank(wanted[0], more, case.tolerance)
    except (FunctionRaisedError, RanksLostError) as failure:
        return case.failure(kind, failure, what)
    except (ArgumentError, RankError) as failure:
        return Finding(kind, f"{what}: {_reason(failure)}", (), case.forward_line)
    if factors is not None:
        shown = _shown(factors, sizes)
        ranks = tuple(r for r, f in enumerate(factors) if not math.isclose(f, 1, rel_tol=1e-6))
        return Finding(kind, f"{what} the gradient is {shown}, as {wanted[0]}", ranks, case.line)
    by = "" if math.isinf(error) else f" by {error:.0%}"
    return Finding(kind, f"{what} backward is not the adjoint: wrong{by} as {wanted[0]}", (), case.line)


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines()]
    return next((line.removeprefix("got").strip() for line in lines if line.startswith("got")), lines[0])


def _shown(factors: Sequence[float], sizes: Sequence[int]) -> str:
    """Describe the ranks' factors by a known formula if one fits, else list them."""
    world, total = len(sizes), sum(sizes)
    formulas = {
        "W times too large": [float(world)] * world,
        "too small by W": [1 / world] * world,
        "scaled by the rank's share of the rows": [n / total for n in sizes],
        "scaled by W times the rank's share of the rows": [world * n / total for n in sizes],
        "divided by the rank's share of the rows": [total / n if n else math.inf for n in sizes],
        "divided by W times the rank's share of the rows": [
            total / n / world if n else math.inf for n in sizes
        ],
    }
    for name, values in formulas.items():
        if all(math.isclose(f, v, rel_tol=1e-6) for f, v in zip(factors, values, strict=True)):
            return name
    return f"{', '.join(f'{f:.4g}' for f in factors)} times the correct one (by rank)"
