"""Groups in which a rank's numbers differ, and ranks that have no use for a result."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from gradmesh.errors import ArgumentError, RankError
from gradmesh.order import ordered
from gradmesh.verify.auditing.case import Case, RefusedError, show_troubles, worst_trouble
from gradmesh.verify.auditing.pool import LostError
from gradmesh.verify.auditing.probes import Answer, Probe, attempt, cotangents, first_order, leaves_of
from gradmesh.verify.auditing.readings import distance
from gradmesh.verify.auditing.report import Finding
from gradmesh.verify.auditing.subject import IN_BACKWARD, Subject

__all__ = ["own_rank", "unused_output"]


def own_rank(case: Case) -> Iterator[Finding]:
    """The same questions in a group of other ranks, and on machines of one rank each; the answers have to stay."""
    kind = "own-rank-assumed"
    asked = False
    case.pool.begin()  # what was held last may have had other sizes
    if case.pool.takes("group"):
        asked = True
        size = case.pool.size
        what = f"in a group of ranks 1 to {size} of a world of {size + 1}"
        with case.pool.larger(outside=1) as pool:
            by_rank = _asked(case, pool.ask, what)
        if isinstance(by_rank, Finding):
            yield by_rank
        else:
            yield from _compared(case, by_rank, what)
    if case.pool.takes("local_rank"):
        asked = True
        with case.pool.built_with(local_rank=0):
            by_rank = _asked(case, case.pool.ask, "with one rank on each machine")
        if isinstance(by_rank, Finding):
            yield by_rank
        else:
            yield from _compared(case, by_rank, "with one rank on each machine")
    if not asked:
        case.left_out[kind] = "as build takes neither group= nor local_rank="


def _asked(case: Case, ask: object, what: str) -> list[Answer] | Finding:
    try:
        by_rank: list[list[Answer]] = ask(first_order, [_same_operands(case)])  # type: ignore[operator]
    except LostError as error:
        return case.refused("own-rank-assumed", error, what)
    except (ArgumentError, RankError) as error:
        text = f"{what}: build fails: {str(error).splitlines()[0].removeprefix('gradmesh.launch: ')}"
        return Finding("own-rank-assumed", text, (), case.forward_line)
    raised = {rank: row[0].trouble for rank, row in enumerate(by_rank) if row[0].trouble is not None}
    if raised:
        first = worst_trouble(raised)
        text = f"{what}: {show_troubles(raised)}"
        return Finding("own-rank-assumed", text, tuple(sorted(raised)), first.line or case.line)
    return [row[0] for row in by_rank]


def _same_operands(case: Case) -> Probe:
    """A probe at the operands that the ranks had first, as `build` may draw others each time."""
    values = tuple(tuple(told.values) for told in case.pool.described)
    return case.probe(1, point=case.point if case.linear else replace(case.point, turned=values))


def _compared(case: Case, ranks: Sequence[Answer], what: str) -> Iterator[Finding]:
    plain = case.first_order([_same_operands(case)])[0]
    for name, line in (("results", case.forward_line), ("gradients", case.line)):
        off = [
            rank
            for rank, (answer, before) in enumerate(zip(ranks, plain, strict=True))
            if _off(getattr(answer, name), getattr(before, name)) > case.tolerance
        ]
        if off:
            text = f"{what} the {name[:-1]} is another one, of the same operands"
            yield Finding("own-rank-assumed", text, tuple(off), line)
            return


def _off(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    if len(one) != len(other):
        return float("inf")
    return max((distance(a, b) for a, b in zip(one, other, strict=True)), default=0.0)


def unused_output(case: Case) -> Iterator[Finding]:
    """Backward on all ranks but the last, whose loss does not use the result, inside of `ordered()`."""
    idle = case.pool.size - 1
    if not idle:
        return
    what = f"when rank {idle} does not use the result"
    try:
        ranks = case.answered(unused, case.probe(81), idle)[0]
    except (RefusedError, LostError) as error:
        yield case.refused("unused-output", error, what)
        return
    wanted = case.answered(without_one, case.probe(81), idle)[0]
    off = [
        r
        for r, (a, b) in enumerate(zip(ranks, wanted, strict=True))
        if _off(a.gradients, b.gradients) > case.tolerance
    ]
    if off:
        text = f"{what}, gradients are not those of a zero from that rank: calls are mixed up"
        yield Finding("unused-output", text, tuple(off), case.line)


def unused(probe: Probe, idle: int) -> list[Answer]:
    """Forward on every rank, backward on those that use the result."""
    return attempt([probe], lambda subject, probe: _with_idle(subject, probe, idle, zeros=False))


def without_one(probe: Probe, idle: int) -> list[Answer]:
    """Forward and backward on every rank, with zeros from one."""
    return attempt([probe], lambda subject, probe: _with_idle(subject, probe, idle, zeros=True))


def _with_idle(subject: Subject, probe: Probe, idle: int, zeros: bool) -> Answer:
    leaves = [x.requires_grad_() for x in leaves_of(subject, probe)]
    with ordered() as order:
        results = subject.call([leaf.clone() for leaf in leaves])
        used = [y for y in results if y.requires_grad] if subject.rank != idle or zeros else []
        handed = cotangents(subject, probe, used)
        if subject.rank == idle:
            handed = [torch.zeros_like(y) for y in handed]
        try:
            grads = order.grad(used or None, leaves, handed or None, allow_unused=True)
        except Exception as error:
            error.add_note(IN_BACKWARD)
            raise
    return Answer(
        gradients=[torch.zeros_like(x) if g is None else g for g, x in zip(grads, leaves, strict=True)]
    )
