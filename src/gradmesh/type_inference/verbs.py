"""The library's own collectives, followed: their types stand in the registry of the ops."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gradmesh._torch import is_fake
from gradmesh.axis import Axis
from gradmesh.call_sites import Site, call_site
from gradmesh.ops.base import LinearOp, Op
from gradmesh.ops.extremum import Extremum
from gradmesh.ops.mean import Mean
from gradmesh.ops.pair import Receive, Send
from gradmesh.transport.call_checks import BACKWARD, NEEDS_BACKWARD, CallRecord
from gradmesh.type_inference.digest import token
from gradmesh.type_inference.findings import Condition, Finding, began_at, types_of
from gradmesh.type_inference.kinds import SAMES, UNKNOWN, I, Kind, P, R, S, V, flavor
from gradmesh.type_inference.tape import Mark, Node
from gradmesh.type_inference.tracker import Tracker, together
from gradmesh.types import Type

__all__ = ["beside", "follow", "relation"]


def follow(
    tracker: Tracker, op: Op, x: Tensor, recorded: CallRecord | None, run: Callable[[], Tensor]
) -> Tensor:
    """Run an op of the library, and note what its result is."""
    if tracker.aside or is_fake(x) or op.axis.size == 1:
        return run()
    node, site = tracker.node_of(x), call_site()
    where = [relation(axis, op.axis) for axis in tracker.axes]
    rows: Sequence[Sequence[Mark]] = ()
    number = tracker.next_call(op.axis.global_ranks)
    alone = isinstance(op, Send | Receive)
    if op.sends and not alone:
        # What is compared here is only whether all come to a call: the call itself compares what it is.
        rows = tracker.meet(op.axis, f"call {number}", node.marks, x.device)
    back = recorded is not None and recorded.role == BACKWARD
    learns = recorded is not None and bool(recorded.flags & NEEDS_BACKWARD) and not back
    for at, relates in enumerate(where):
        if relates == "on" and isinstance(op, LinearOp | Extremum):
            _check(tracker, op, node, at, [row[at] for row in rows], site, back=back, learns=learns)
    busy, tracker.busy = tracker.busy, True
    try:
        y = run()
    finally:
        tracker.busy = busy
    marks = tuple(
        _mark(op, mark, relates, [row[at] for row in rows], number)
        for at, (mark, relates) in enumerate(zip(node.marks, where, strict=True))
    )
    learned = learns or (back and torch.is_grad_enabled())
    tracker.keep(
        y, Node(op.verb, site, (node,), marks, collective=True, learns=learned, shape=tuple(y.shape))
    )
    return y


def relation(axis: Axis, called: Axis) -> str:
    """How the ranks of an axis lie to those of a call: all of them "on" it, each "beside" it in a call of its own."""
    mine, others = set(axis.global_ranks), set(called.global_ranks)
    return "on" if mine <= others else "beside" if len(mine & others) == 1 else "across"


def _mark(op: Op, own: Mark, relates: str, rows: Sequence[Mark], number: int) -> Mark:
    """What the result is over one axis."""
    if relates == "across":
        return Mark(UNKNOWN, 0)
    if relates == "beside":
        return beside(op.called, op.axis.rank, rows or [own], linear=isinstance(op, LinearOp))
    made = token(op.called, op.axis.global_ranks, number)
    if isinstance(op, Extremum):
        return Mark(S, made)
    if not isinstance(op, LinearOp) or op.dst is Type.V:
        return Mark(V, 0)
    kind = {Type.R: R, Type.I: I, Type.P: P}[op.dst]
    if op.sends or op.src is Type.V:  # V: called a pending sum, whatever it holds
        return Mark(kind, made)
    if own.kind == UNKNOWN or own.kind not in SAMES:
        return Mark(UNKNOWN if own.kind == UNKNOWN else V, 0)
    return Mark(kind, token(op.called, own.number))


def beside(words: str, place: int, rows: Sequence[Mark], *, linear: bool) -> Mark:
    """What the result of a call is over an axis that each of its ranks has one of.

    Along that axis, all ranks make such calls of their own, with what lies at the same place.
    """
    kinds = {mark.kind for mark in rows}
    kind: Kind
    if UNKNOWN in kinds:
        kind = UNKNOWN
    elif kinds <= SAMES:
        kind = flavor(kinds)
    elif P in kinds and linear:
        kind = P if kinds <= {P, "Z"} else UNKNOWN
    else:
        kind = V
    numbers = [mark.number for mark in rows]
    return Mark(kind, token(words, place, numbers) if kind in SAMES or kind == P else 0)


def _check(
    tracker: Tracker,
    op: LinearOp | Extremum,
    node: Node,
    at: int,
    rows: Sequence[Mark],
    site: Site,
    *,
    back: bool,
    learns: bool,
) -> None:
    """Hold the operand's type against what the op takes."""
    own = node.marks[at]
    kind = together(rows) if rows else own.kind
    problem = _problem(op, kind, back=back, learns=learns)
    if problem == "operand-type" and kind == R and node.replicated(at) is None:
        problem = ""  # R by numbers alone that have no gradient, such as counts
    absent: tuple[int, ...] = ()
    if not problem:
        told_the_same = isinstance(op, LinearOp) and op.src in (Type.R, Type.I)
        if rows or kind not in SAMES or not told_the_same:
            return
        # Nothing is sent: whether the ranks have the same is seen later.
        problem, absent, kind = "gradient-differs" if back else "not-the-same", (own.number,), V
    took = "" if isinstance(op, Extremum) else f"a value of type {op.src}"
    name = f"gm.{op.called}" + (" in backward" if back else "")
    began = "" if node.site == site or not node.op else f"the operand {began_at(node.op, node.site)}"
    types = types_of([(kind, node.shape)])
    finding = Finding.at(problem, name, tracker.axes[at].name, types, site, began, took)
    if rows:
        tracker.found(finding)
        return
    present = (own.number,) if own.number and not absent else ()
    words = token("finding", problem, op.called, own.number, site and site[1])
    tracker.expect(Condition(lambda: finding, at, present, words, absent))


def _problem(op: LinearOp | Extremum, kind: Kind, *, back: bool, learns: bool) -> str:
    """The kind of finding, if there is one."""
    if kind == UNKNOWN:
        return ""
    if isinstance(op, Extremum):
        return "nonlinear-on-partial" if kind == P else ""
    if back:
        return "gradient-differs" if op.src in (Type.R, Type.I) and kind not in SAMES else ""
    if op.src is Type.P:
        if isinstance(op, Mean):  # of R values, whose gradients are summed, it is right
            return "averaged-again" if learns and kind == I else ""
        return "summed-again" if learns and kind in (R, I) else ""
    if op.src is Type.V:
        return "operand-type" if kind == P else ""
    if kind == V:
        return "not-the-same"
    other = I if op.src is Type.R else R
    return "operand-type" if kind == P or (learns and kind == other) else ""
