"""Collectives inside of a typed block: the library's own, whose types are in the registry of ops, and those of torch.

`COLLECTIVES` lists torch's collectives once, for this package and for the checker. The results of torch's have no
convention for their gradients: they are the same on every rank, R or I depending on their use, or they vary. Groups of
the library's own backends are not seen by the dispatcher; what such calls write is observed afterwards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradmesh._torch import group_behind, in_backward, is_fake, resolve_group
from gradmesh._util.call_sites import Site, call_site
from gradmesh._util.structure import tensors_in
from gradmesh.errors import GradmeshError
from gradmesh.ops.all_reduce import Extremum
from gradmesh.ops.base import LinearOp, Op
from gradmesh.ops.mean import Mean
from gradmesh.ops.pair import Receive, Send
from gradmesh.runtime.mesh import Axis
from gradmesh.transport.call_checks import BACKWARD, NEEDS_BACKWARD, CallRecord
from gradmesh.type_inference.rules import SAMES, UNKNOWN, I, Kind, P, R, S, V, flavor
from gradmesh.type_inference.tracker import (
    Condition,
    Finding,
    Mark,
    Node,
    Tracker,
    began_at,
    memory_of,
    together,
    token,
    types_of,
)
from gradmesh.types import Type

_WRITING = {
    "allreduce_": ("all_reduce", "tensors", "tensors"),
    "allreduce_coalesced_": ("all_reduce", "tensors", "tensors"),
    "allgather_": ("all_gather", "input_tensors", "output_tensors"),
    "_allgather_base_": ("all_gather", "input_tensor", "output_tensor"),
    "allgather_coalesced_": ("all_gather_each", "input_list", "output_lists"),
    "allgather_into_tensor_coalesced_": ("all_gather_each", "inputs", "outputs"),
    "reduce_scatter_": ("reduce_scatter", "input_tensors", "output_tensors"),
    "_reduce_scatter_base_": ("reduce_scatter", "input_tensor", "output_tensor"),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter_each", "inputs", "outputs"),
    "broadcast_": ("broadcast", "tensors", "tensors"),
    "reduce_": ("reduce", "tensors", "tensors"),
    "gather_": ("gather", "input_tensors", "output_tensors"),
    "scatter_": ("scatter", "input_tensors", "output_tensors"),
    "alltoall_": ("all_to_all", "input_tensors", "output_tensors"),
    "alltoall_base_": ("all_to_all_single", "input", "output"),
    "send": ("send", "tensors", ""),
    "recv_": ("recv", "", "tensors"),
    "recv_any_source_": ("recv", "", "tensors"),
    "barrier": ("barrier", "", ""),
    "monitored_barrier_": ("barrier", "", ""),
}
"""Operators that write: what they are, what they take and where they write."""

_MAKING = {
    "all_reduce": ("all_reduce", "input", ""),
    "all_reduce_": ("all_reduce", "input", "input"),
    "all_reduce_coalesced": ("all_reduce", "inputs", ""),
    "all_reduce_coalesced_": ("all_reduce", "inputs", "inputs"),
    "all_gather_into_tensor": ("all_gather", "input", ""),
    "all_gather_into_tensor_out": ("all_gather", "input", "out"),
    "all_gather_into_tensor_coalesced": ("all_gather_each", "inputs", ""),
    "reduce_scatter_tensor": ("reduce_scatter", "input", ""),
    "reduce_scatter_tensor_out": ("reduce_scatter", "input", "out"),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter_each", "inputs", ""),
    "all_to_all_single": ("all_to_all_single", "input", ""),
    "broadcast": ("broadcast", "input", ""),
    "broadcast_": ("broadcast", "input", "input"),
}
"""Those that make their result, mostly."""

COLLECTIVES = {"c10d": _WRITING, "_c10d_functional": _MAKING}
"""By namespace and name: the kind, the argument that is taken, and that which is written; "" where there is none."""


def follow_verb(
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
    with tracker.paused():
        y = run()
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
    """Compare the operand's type with what the op takes."""
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


_LEAVES = {
    "all_reduce": "S",
    "all_gather": "S",
    "all_gather_each": "S",
    "broadcast": "S",
    "reduce": "V",
    "reduce_scatter": "V",
    "reduce_scatter_each": "V",
    "gather": "V",
    "scatter": "V",
    "all_to_all": "V",
    "all_to_all_single": "V",
}
"""What the collectives that every rank of a group calls leave: the same on every rank, or not."""

CALLS = {
    space: {name: _LEAVES[kind] for name, (kind, _, _) in operators.items() if kind in _LEAVES}
    for space, operators in COLLECTIVES.items()
}

_IN_PLACE = frozenset({"allreduce_", "allreduce_coalesced_", "broadcast_", "reduce_"})


def follow_torch(tracker: Tracker, space: str, name: str, args: Sequence[Any], run: Callable[[], Any]) -> Any:
    """Run a collective of torch, and note what its results are."""
    leaves, axis = CALLS[space].get(name), _axis(space, args)
    functional = space == "_c10d_functional"
    if name in ("wait_tensor", "_wrap_tensor_autograd"):
        return _passed_on(tracker, args[0], run)
    if leaves is None or axis is None or axis.size == 1:
        with tracker.paused():
            result = run()
        if not functional:
            for one in tensors_in(list(args)):
                tracker.values.written(one)
        return result
    written = [] if functional else [*tensors_in(args[0])]
    read = [*tensors_in(list(args if functional or name in _IN_PLACE else args[1:]))]
    site, number = call_site(), tracker.next_call(axis.global_ranks)
    nodes = [tracker.node_of(one) for one in read]
    rows = _met(tracker, axis, f"raw call {number}", nodes, (*read, *written))
    with tracker.paused():
        result = run()
    times = Counter(map(memory_of, written))
    words = f"{space}.{name}"
    for order, one in enumerate(tensors_in(result) if functional else written):
        marks = []
        for at, mine in enumerate(tracker.axes):
            relates = relation(mine, axis)
            if relates == "beside":
                marks.append(beside(f"{words} {order}", axis.rank, [row[at] for row in rows], linear=True))
            elif relates == "across":
                marks.append(Mark(UNKNOWN, 0))
            else:
                made = token(words, order, number, axis.global_ranks)
                marks.append(Mark(S, made) if leaves == "S" else Mark(V, 0))
                if in_backward():
                    tracker.forgive_averaged(at)
        node = Node(words, site, tuple(nodes), tuple(marks), collective=True, shape=tuple(one.shape))
        tracker.keep(one, node, times=0 if functional else times[memory_of(one)])
    return result


def _passed_on(tracker: Tracker, x: Tensor, run: Callable[[], Any]) -> Any:
    """The result of a wait is the result of the call."""
    found = tracker.values.find(x)
    result = run()
    if found is not None and type(result) is Tensor:
        tracker.keep(result, found[0], patches=found[1])
    return result


def _met(
    tracker: Tracker, axis: Axis, call: str, nodes: Sequence[Node], tensors: Sequence[Tensor]
) -> list[list[Mark]]:
    """Exchange marks with the ranks of the call: one over each axis for all operands of a rank."""
    row = [
        beside(call, 0, [node.marks[at] for node in nodes], linear=True) for at in range(len(tracker.axes))
    ]
    device = tensors[0].device if tensors else torch.device("cpu")
    return tracker.meet(axis, call, row, device)


def _axis(space: str, args: Sequence[Any]) -> Axis | None:
    """The ranks of a call."""
    group: dist.ProcessGroup | None = None
    if space == "c10d":
        boxed = [arg for arg in args if isinstance(arg, torch.ScriptObject)]
        found = [group_behind(one) for one in boxed]
        group = next((one for one in found if one is not None), None)
    else:
        names = [arg for arg in args if isinstance(arg, str)]
        try:
            group = resolve_group(names[-1]) if names else None
        except (GradmeshError, RuntimeError, ValueError, LookupError):
            return None
    if group is None:
        return None
    return Axis("group", dist.get_rank(group), dist.get_world_size(group), group)
