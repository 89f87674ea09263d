"""Uneven and empty shards."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from gradmesh.errors import ArgumentError, RankError
from gradmesh.verify.auditing.case import Case, FunctionRaisedError
from gradmesh.verify.auditing.checks.adjoint import ask_all, by_rank, holding_readings
from gradmesh.verify.auditing.checks.opening import shapes
from gradmesh.verify.auditing.pool import RanksLostError
from gradmesh.verify.auditing.probes import Point
from gradmesh.verify.auditing.readings import Reading, all_readings, law_error, named
from gradmesh.verify.auditing.report import Finding

__all__ = ["parts"]


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
    return Finding(
        kind, f"{what} backward is not the adjoint: wrong{by} as {_names(wanted[:1])}", (), case.line
    )


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


def _names(readings: Sequence[Reading]) -> str:
    return ", ".join(map(str, readings))
