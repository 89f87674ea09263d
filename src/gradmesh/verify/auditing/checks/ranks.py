"""Groups whose ranks differ from the global and local ranks, and ranks that do not use a result."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from gradmesh.autograd.ordered import ordered
from gradmesh.errors import ArgumentError, RankError
from gradmesh.verify.auditing.case import Case, FunctionRaisedError, show_failures, worst_failure
from gradmesh.verify.auditing.pool import RanksLostError
from gradmesh.verify.auditing.probes import Answer, Probe, attempt, cotangents, first_order, leaves_of
from gradmesh.verify.auditing.readings import distance
from gradmesh.verify.auditing.report import Finding
from gradmesh.verify.auditing.subject import IN_BACKWARD, Subject

__all__ = ["own_rank", "unused_output"]


def own_rank(case: Case) -> Iterator[Finding]:
    """Results must not change in a group with other global ranks, nor on hosts with one rank each."""
    kind = "own-rank-assumed"
    asked = False
    case.pool.begin()  # an earlier check may have left a function with other sizes
    if case.pool.accepts("group"):
        asked = True
        size = case.pool.size
        what = f"in a group of ranks 1 to {size} of a world of {size + 1}"
        with case.pool.larger(outside=1) as pool:
            by_rank = _call_on_ranks(case, pool.ask, what)
        if isinstance(by_rank, Finding):
            yield by_rank
        else:
            yield from _compared(case, by_rank, what)
    if case.pool.accepts("local_rank"):
        asked = True
        with case.pool.built_with(local_rank=0):
            by_rank = _call_on_ranks(case, case.pool.ask, "with one rank per host")
        if isinstance(by_rank, Finding):
            yield by_rank
        else:
            yield from _compared(case, by_rank, "with one rank per host")
    if not asked:
        case.left_out[kind] = "build accepts neither group= nor local_rank="


def _call_on_ranks(case: Case, ask: object, what: str) -> list[Answer] | Finding:
    try:
        by_rank: list[list[Answer]] = ask(first_order, [_same_operands(case)])  # type: ignore[operator]
    except RanksLostError as error:
        return case.failure("own-rank-assumed", error, what)
    except (ArgumentError, RankError) as error:
        text = f"{what}: build fails: {str(error).splitlines()[0].removeprefix('gradmesh.launch: ')}"
        return Finding("own-rank-assumed", text, (), case.forward_line)
    raised = {rank: row[0].failure for rank, row in enumerate(by_rank) if row[0].failure is not None}
    if raised:
        first = worst_failure(raised)
        text = f"{what}: {show_failures(raised)}"
        return Finding("own-rank-assumed", text, tuple(sorted(raised)), first.line or case.line)
    return [row[0] for row in by_rank]


def _same_operands(case: Case) -> Probe:
    """A probe at the operands of the first run, since `build` may return others at each call."""
    values = tuple(tuple(each.values) for each in case.pool.described)
    return case.probe(1, point=case.point if case.linear else replace(case.point, rotated=values))


def _compared(case: Case, ranks: Sequence[Answer], what: str) -> Iterator[Finding]:
    plain = case.first_order([_same_operands(case)])[0]
    for name, line in (("results", case.forward_line), ("gradients", case.line)):
        off = [
            rank
            for rank, (answer, before) in enumerate(zip(ranks, plain, strict=True))
            if _off(getattr(answer, name), getattr(before, name)) > case.tolerance
        ]
        if off:
            text = f"{what} the {name[:-1]} changes, for the same operands"
            yield Finding("own-rank-assumed", text, tuple(off), line)
            return


def _off(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    if len(one) != len(other):
        return float("inf")
    return max((distance(a, b) for a, b in zip(one, other, strict=True)), default=0.0)


def unused_output(case: Case) -> Iterator[Finding]:
    """Run backward inside `ordered()` on all ranks but the last, whose loss does not use the result."""
    idle = case.pool.size - 1
    if not idle:
        return
    what = f"when rank {idle} does not use the result"
    try:
        ranks = case.answered(unused, case.probe(81), idle)[0]
    except (FunctionRaisedError, RanksLostError) as error:
        yield case.failure("unused-output", error, what)
        return
    wanted = case.answered(without_one, case.probe(81), idle)[0]
    off = [
        r
        for r, (a, b) in enumerate(zip(ranks, wanted, strict=True))
        if _off(a.gradients, b.gradients) > case.tolerance
    ]
    if off:
        text = f"{what}, the gradients are wrong: they differ from those for a zero gradient of that rank"
        yield Finding("unused-output", text, tuple(off), case.line)


def unused(probe: Probe, idle: int) -> list[Answer]:
    """Run forward on every rank, backward on those that use the result."""
    return attempt([probe], lambda subject, probe: _with_idle(subject, probe, idle, zeros=False))


def without_one(probe: Probe, idle: int) -> list[Answer]:
    """Run forward and backward on every rank, with a zero gradient on one."""
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
