"""Whether backward is the adjoint, under which readings, and otherwise by which factor it is wrong.

Readings that hold trivially, without constraining backward, are excluded. Also second-order gradients (the gradient of
a linear map is its adjoint applied to the cotangent, and differentiating that gives the map again), and the first-order
law with uneven and empty shards.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradmesh.errors import ArgumentError, RankError
from gradmesh.types import Type
from gradmesh.verify.auditing.findings import Finding
from gradmesh.verify.auditing.opening import shapes
from gradmesh.verify.auditing.probes import (
    OTHER_OWNER,
    Case,
    FunctionRaisedError,
    Point,
    Probe,
    ProbeError,
    Redrawn,
    cotangents,
    first_order,
    forward_only,
    leaves_of,
    mapped,
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
    largest_distance,
    named,
    ranks_apart,
    strongest,
    usual,
    usual_of_name,
)
from gradmesh.verify.auditing.subject import Subject, dense, noted_in_backward

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
    plain = case.pairings[free].probes[0]  # type: ignore[index]
    alike = [
        shape is not None and agree([a.results for a in plain], i, case.tolerance)
        for i, shape in enumerate(case.out_shapes)
    ]
    depending = [_dependencies(case, plain, False, i) for i in range(len(case.shapes))]
    depending_back = [_dependencies(case, plain, True, i) for i in range(len(case.out_shapes))]
    case.senders = {one for pairs in depending for one, _ in pairs}
    rotates = [
        _sent(pairs) and (_rotates(case, False, i) or _copied(case, plain, i))
        for i, pairs in enumerate(depending)
    ]
    rotates_back = [_sent(pairs) and _rotates(case, True, i) for i, pairs in enumerate(depending_back)]

    def kept(reading: Reading) -> bool:
        same, same_out = reading.pattern
        return not (
            any(one and kind in (V, P) for one, kind in zip(alike, reading.dst, strict=True))
            or any(one and other for one, other in zip(rotates, same, strict=True))
            or any(one and other for one, other in zip(rotates_back, same_out, strict=True))
        )

    return [reading for reading in readings if kept(reading)]


def _outputs(answer: Answer, back: bool) -> list[Tensor]:
    """The results, or those of backward."""
    return answer.gradients if back else answer.results


def _sent(dependencies: Iterable[tuple[int, int]]) -> bool:
    """Whether a rank depends on another one."""
    return any(one != rank for one, rank in dependencies)


def _dependencies(case: Case, plain: Sequence[Answer], back: bool, index: int) -> list[tuple[int, int]]:
    """The ranks that have an operand, each with a rank whose results depend on it; with `back`: of the gradients."""
    ranks = range(case.pool.size)
    changed = range(min(case.pool.size, _CHANGED))
    probes = [
        case.probe(1, redrawn=Redrawn(back, index, tuple(OTHER_OWNER if r == one else r for r in ranks)))
        for one in changed
    ]
    answers = case.pool.answered(first_order if back else forward_only, probes)
    return [
        (one, rank)
        for one in changed
        for rank in ranks
        if largest_distance(_outputs(plain[rank], back), _outputs(answers[one][rank], back))
        > 10 * case.tolerance
    ]


def _rotates(case: Case, back: bool, index: int) -> bool:
    """Whether rotating an operand over the ranks leaves the results unchanged or rotates them too.

    With `back`: the same for the gradient of a result and the gradients of the operands.
    """
    if (case.out_shapes if back else case.shapes)[index] is None:
        return False
    size = case.pool.size
    following = tuple((rank + 1) % size for rank in range(size))
    plain, rotated = case.probe(1), case.probe(1, redrawn=Redrawn(back, index, following))
    if not back and not case.linear:
        values = [tuple(each.values) for each in case.pool.begin()]
        moved = [
            (*own[:index], values[after][index], *own[index + 1 :])
            for own, after in zip(values, following, strict=True)
        ]
        plain = replace(plain, point=replace(case.point, rotated=tuple(values)))
        rotated = replace(rotated, point=replace(case.point, rotated=tuple(moved)))
    before, after_it = (
        [_outputs(answer, back) for answer in ranks]
        for ranks in case.pool.answered(first_order if back else forward_only, [plain, rotated])
    )
    return any(not ranks_apart(had, after_it, case.tolerance) for had in (before, before[1:] + before[:1]))


def _copied(case: Case, ranks: Sequence[Answer], index: int) -> bool:
    """Whether results only move elements of operands, and some rank receives all of another rank's operand."""
    if case.whole or not case.linear:
        return False
    values = torch.cat([x.reshape(-1) for answer in ranks for x in answer.operands])
    values = torch.cat([values, values.new_zeros(1)])
    for rank, answer in enumerate(ranks):
        if not answer.results:
            continue
        got = torch.cat([y.reshape(-1) for y in answer.results])
        others = [a.operands[index] for other, a in enumerate(ranks) if other != rank]
        if _isin(got, values) and any(x.numel() and _isin(x, got) for x in others):
            return True
    return False


def _isin(values: Tensor, among: Tensor) -> bool:
    return bool((values.reshape(-1, 1) == among.reshape(1, -1)).any(1).all())


_PROBES = 3
"""Probes per pattern; `Pairings.factors_by_rank` needs more."""

_SORTED = 1024
"""The maximum number of readings to sort, because sorting compares all pairs."""


def adjoint(case: Case) -> Iterator[Finding]:
    """The first-order law on random operands of every type; stores answers, readings and arrows in the case."""
    every_reading = readings = all_readings(case.shapes, case.out_shapes)
    try:
        case.pairings = ask_all(case, readings)
        readings = with_a_point(case, readings)
    except ProbeError as error:
        kind = "backward-raises" if error.kind == "raises" else error.kind
        stages = [failure.stage for failure in error.failures.values()]
        what = "gradient" if stages[:1] == ["backward"] else "operand"
        yield case.failure(kind, error, f"on a contiguous {what}")
        return
    every = [ranks for pairings in case.pairings.values() for ranks in pairings.probes]
    lines = [line for ranks in every for answer in ranks for line in answer.lines]
    case.line = lines[0] if lines else case.forward_line
    if any(answer.scaled for ranks in every for answer in ranks):
        case.scaled = "; that includes the factor of gm.scale_gradient: if it is meant, audit without it"
    yield from notes(case, every)
    case.arrows = strongest(holding_readings(case, readings, case.pairings))
    case.readings = [r for r in every_reading if any(arrow.implies(r) for arrow in case.arrows)]
    if case.arrow is not None:
        yield from _meant(case, case.arrow)
    elif not case.readings and not all_tried(case.shapes, case.out_shapes):
        count = len(case.shapes) + len(case.out_shapes)
        case.left_out["not-adjoint"] = f"{count} tensors have too many combinations of types to try"
    elif not case.readings:
        yield _excluded_or_wrong(case, readings, holding_readings(case, every_reading, case.pairings))
    elif case.pool.size > 1:
        yield from _unusual(case)


def _meant(case: Case, arrow: str) -> Iterator[Finding]:
    """The law under the requested reading."""
    reading = named(arrow, len(case.shapes), len(case.out_shapes))
    if reading is None:
        raise ArgumentError.of(
            "invalid arrow for this function",
            op="verify.audit",
            expected=f"types V, R, P or I of {len(case.shapes)} operands and {len(case.out_shapes)} results, "
            "or one for all",
            got=repr(arrow),
            remedy='pass the intended types, e.g. arrow="V -> R"',
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
    pairings = dict(case.pairings)
    if reading.pattern not in pairings:
        pairings |= ask_all(case, [reading])
    if holding_readings(case, [reading], pairings):
        case.readings = list(dict.fromkeys([*case.readings, reading]))
        case.assumes = _assumed([reading])
        return
    text, ranks, line = _why(case, [reading], pairings)
    others = f"; it is the adjoint as {_names(case.arrows)}" if case.arrows else ""
    asked = "" if f"as {reading}" in text else f"as {reading} (requested): "
    yield Finding("not-adjoint", f"{asked}{text}{others}{case.scaled}", ranks, line)


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
    back = Type.P not in reading.dst
    return all(
        sum(any(bool(x.any()) for x in _outputs(answer, back)) for answer in ranks) <= 1
        for ranks in case.pairings[reading.pattern].probes
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
    case: Case, readings: Sequence[Reading], seed: int = 1, count: int = _PROBES, **changes: object
) -> dict[Pattern, Pairings]:
    """First-order answers for every pattern that the readings need."""
    patterns = list(dict.fromkeys(reading.pattern for reading in readings))
    probes = [case.probe(seed + n, pattern, **changes) for pattern in patterns for n in range(count)]
    answers = case.pool.answered(first_order, probes)
    return {p: Pairings(answers[i * count : (i + 1) * count], case.tolerance) for i, p in enumerate(patterns)}


def holding_readings(
    case: Case, readings: Sequence[Reading], pairings: Mapping[Pattern, Pairings]
) -> list[Reading]:
    """The readings that hold."""
    return [r for r in readings if pairings[r.pattern].error(r) <= case.tolerance]


def notes(case: Case, probes: Iterable[Sequence[Answer]]) -> Iterator[Finding]:
    """Findings of forbidden writes and shared memory, each once with all of its ranks."""
    seen: dict[tuple[str, str, str | None], set[int]] = {}
    for ranks in probes:
        for rank, answer in enumerate(ranks):
            for note in answer.notes:
                seen.setdefault(note, set()).add(rank)
    for (kind, text, line), ranks_of in seen.items():
        yield Finding(kind, text, tuple(sorted(ranks_of)), line or case.line)


def _excluded_or_wrong(case: Case, readings: Sequence[Reading], excluded: Sequence[Reading]) -> Finding:
    """What is wrong if only readings hold that were excluded because they make the collective unnecessary."""
    summed = [r for r in excluded if not any(r.pattern[1]) and Type.R not in r.src]
    if summed and len(case.senders) == 1:
        text = f"backward is the adjoint only as {_names(strongest(summed))}, where operands are equal on every rank"
        return Finding("unusual-reading", f"{text} and forward need not communicate", (), case.line)
    text, ranks, line = _why(case, readings, case.pairings)
    if equal := [r for r in excluded if any(r.pattern[1])]:
        text += f"; correct as {strongest(equal)[0]}, where gradients are equal on every rank and need no reduction"
    return Finding("not-adjoint", text + case.scaled, ranks, line)


def _why(
    case: Case, readings: Sequence[Reading], pairings: Mapping[Pattern, Pairings]
) -> tuple[str, tuple[int, ...], str | None]:
    """What is wrong with a backward that is not an adjoint: a factor that explains the values, or the error."""
    world = case.pool.size
    every = [ranks for each in pairings.values() for ranks in each.probes]
    without = tuple(rank for rank in range(world) if not any(ranks[rank].reached for ranks in every))
    if len(without) == world:
        return "backward returns no gradient on any rank", (), case.forward_line
    for reading in _from_the_strongest(readings) if len(readings) <= _SORTED else readings:
        factor = pairings[reading.pattern].factor(reading)
        if factor is not None:
            return f"the gradient is {_named(factor, world)} as {reading}", (), case.line
    if without:
        return f"backward returns no gradient on {len(without)} of {world} ranks", without, case.line
    errors = [(pairings[reading.pattern].error(reading), reading) for reading in readings]
    error, nearest = min(errors, key=lambda pair: pair[0])
    if math.isinf(error):
        text = "no reading fits: results or gradients differ between ranks where types require equal ones"
        return text, (), case.line
    which = "the error is" if len(readings) == 1 else f"under the closest reading, {nearest}, the error is"
    return f"the gradient is not a multiple of the correct one; {which} {error:.0%}", (), case.line


def _from_the_strongest(readings: Sequence[Reading]) -> list[Reading]:
    """The usual readings first, and of those the one that implies most others."""
    return sorted(readings, key=lambda r: (not usual(r), -sum(r.implies(other) for other in readings)))


def _named(factor: float, world: int) -> str:
    names = {float(world): f"W = {world} times too large", 1 / world: f"too small by W = {world}"}
    for value, name in names.items():
        if math.isclose(factor, value, rel_tol=1e-6):
            return name
    if factor < 0:
        return f"{factor:.4g} times the correct one"
    return f"{factor:.4g} times too large" if factor > 1 else f"too small by {1 / factor:.4g}"


KINDS_OF = ("second-order-raises", "second-order-wrong", "second-order-lost")
"""The kinds that this check reports."""


@dataclass(frozen=True)
class _Second:
    """The outcome of double backward along a direction u."""

    wanted: list[Tensor]  # A u
    back: list[Tensor]  # the gradient of <A* y, u> with respect to y
    kept: bool  # whether the gradient A* y requires grad
    arrived: bool  # whether `back` is not zero


def second_order(case: Case) -> Iterator[Finding]:
    """The second-order law; must hold under one of the readings that hold in first order."""
    worst: Finding | None = None
    if not case.arrows:
        case.left_out |= dict.fromkeys(KINDS_OF, "backward is not an adjoint in first order")
    for arrow in case.arrows:
        try:
            probes = case.pool.answered(_second, [case.probe(41 + n, arrow.pattern) for n in range(2)])
        except ProbeError as error:
            if (
                isinstance(error, FunctionRaisedError)
                and error.kind == "raises"
                and error.first.stage == "forward"
            ):
                case.left_out |= dict.fromkeys(KINDS_OF, f"forward raises there: {error.first.first}")
                return
            worst = worst or case.failure("second-order-raises", error, "under create_graph=True")
            continue
        found = _check_reading(case, arrow, probes)
        if found is None:
            return
        worst = found if worst is None or worst.kind == "second-order-raises" else worst
    if worst is not None:
        yield worst


def _check_reading(case: Case, arrow: Reading, probes: Sequence[Sequence[_Second]]) -> Finding | None:
    every = [answer for ranks in probes for answer in ranks]
    if all(_zero(answer.wanted) for answer in every):
        return None
    if not any(answer.arrived for answer in every):
        kept = any(answer.kept for answer in every)
        what = "does not depend on the incoming gradient" if kept else "has no graph"
        return Finding("second-order-lost", f"the gradient {what}, as {arrow}", (), case.line)
    errors: dict[int, float] = {}  # by rank
    for ranks in probes:
        back, wanted = [a.back for a in ranks], [a.wanted for a in ranks]
        for index, kind in enumerate(arrow.dst):
            if kind in (Type.R, Type.I) and not agree(back, index, case.tolerance):
                errors[0] = max(errors.get(0, 0.0), 1.0)
            got, want = ([row[index] for row in rows] for rows in (back, wanted))
            if kind is P:
                got, want = [sum(got, torch.zeros(()))], [sum(want, torch.zeros(()))]
            for rank, error in enumerate(map(distance, got, want)):
                if error > case.tolerance:
                    errors[rank] = max(errors.get(rank, 0.0), error)
    if not errors:
        return None
    dead = [rank for rank in range(len(probes[0])) if not any(ranks[rank].arrived for ranks in probes)]
    silent = all(_zero(ranks[rank].back) for rank in dead for ranks in probes)
    if dead and silent and set(errors) <= set(dead):
        text = f"on some ranks the gradient is not differentiable, as {arrow}"
        return Finding("second-order-lost", text, tuple(dead), case.line)
    text = f"the second-order gradient has an error of {max(errors.values()):.0%}, as {arrow}"
    return Finding("second-order-wrong", text, tuple(sorted(errors)), case.line)


def _zero(tensors: Sequence[Tensor]) -> bool:
    return all(not t.numel() or float(t.abs().max()) == 0.0 for t in tensors)


def _second(subject: Subject, probe: Probe) -> _Second:
    """Run double backward with respect to the incoming gradient."""
    u, image = mapped(subject, probe)
    with subject.differentiated(leaves_of(subject, probe)) as graph:
        y = [c.requires_grad_() for c in cotangents(subject, probe, graph.results)]
        # clones, because torch forbids in-place writes into leaves
        grads = graph.backward([c.clone() for c in y], create_graph=True)
        pairs = [(g, v) for g, v in zip(grads, u, strict=True) if g is not None and g.requires_grad]
        first, along = [g for g, _ in pairs], [v.clone() for _, v in pairs]
        if subject.ordered:
            back = graph.grad(first, y, along)
        else:
            if pairs:
                # backward() and not grad(..., y): the error node of once_differentiable is not on a path to y.
                with noted_in_backward():
                    torch.autograd.backward(first, along)
            back = [c.grad for c in y]
    arrived = any(g is not None and bool(g.any()) for g in back)
    return _Second(image, dense(back, y), bool(pairs), arrived)


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
                case.left_out.pop(kind, None)
                yield found
                break


def _one(case: Case, kind: str, sizes: Sequence[int]) -> Finding | None:
    what = f"with {', '.join(map(str, sizes))} rows"
    uneven = replace(case, point=case.point if case.linear else Point(case.point.step))
    try:
        shapes(uneven)
        readings = all_readings(uneven.shapes, uneven.out_shapes)
        pairings = ask_all(uneven, readings)
        holding = holding_readings(uneven, readings, pairings)
        meant = None if case.arrow is None else named(case.arrow, len(uneven.shapes), len(uneven.out_shapes))
        arrows = case.arrows if meant is None or meant not in case.readings else [meant]
        wanted = [r for r in readings if any(arrow.implies(r) for arrow in arrows)]
        if not wanted or not set(wanted).isdisjoint(holding):
            return None
        closest = _from_the_strongest(wanted)[0]
        error = min(pairings[r.pattern].error(r) for r in wanted)
        more = ask_all(uneven, [closest], seed=300, count=len(sizes) + 3)
        factors = more[closest.pattern].factors_by_rank(closest)
    except ProbeError as failure:
        if failure.refused and len(failure.ranks) == len(sizes):
            case.left_out[kind] = f"{what}, on every rank: {failure}"
            return None
        return case.failure(kind, failure, what)
    except (ArgumentError, RankError) as failure:
        return Finding(kind, f"{what}: {_reason(failure)}", (), case.forward_line)
    if factors is not None:
        ranks = tuple(r for r, f in enumerate(factors) if not math.isclose(f, 1, rel_tol=1e-6))
        said = f"{what} the gradient is {_shown(factors, sizes)}, as {closest}"
        return Finding(kind, said, ranks, case.line)
    by = "" if math.isinf(error) else f" by {error:.0%}"
    return Finding(kind, f"{what} backward is not the adjoint: wrong{by} as {closest}", (), case.line)


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
