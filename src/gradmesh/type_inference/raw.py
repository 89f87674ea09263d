"""The collectives of torch.distributed, followed where they go through torch's dispatcher, and functional ones.

What they return has no convention for its gradient: it is the same on every rank, R or I as its use makes it, or it
varies. Groups of the library's own backends are not seen here; what such calls write is observed afterwards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradmesh._torch import group_behind, in_backward, resolve_group
from gradmesh.axis import Axis
from gradmesh.call_sites import call_site
from gradmesh.errors import GradmeshError
from gradmesh.type_inference.digest import token
from gradmesh.type_inference.kinds import UNKNOWN, S, V
from gradmesh.type_inference.operators import tensors_in
from gradmesh.type_inference.raw_calls import COLLECTIVES
from gradmesh.type_inference.tape import Mark, Node, memory_of
from gradmesh.type_inference.tracker import Tracker
from gradmesh.type_inference.verbs import beside, relation

__all__ = ["CALLS", "follow"]

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
    "all_to_all_flat": "V",
}
"""What the collectives that every rank of a group calls leave: the same on every rank, or not."""

CALLS = {
    space: {name: _LEAVES[kind] for name, (kind, _, _) in operators.items() if kind in _LEAVES}
    for space, operators in COLLECTIVES.items()
}

_IN_PLACE = frozenset({"allreduce_", "allreduce_coalesced_", "broadcast_", "reduce_"})


def follow(tracker: Tracker, space: str, name: str, args: Sequence[Any], run: Callable[[], Any]) -> Any:
    """Run a collective of torch, and note what its results are."""
    leaves, axis = CALLS[space].get(name), _axis(space, args)
    functional = space == "_c10d_functional"
    if name in ("wait_tensor", "_wrap_tensor_autograd"):
        return _passed_on(tracker, args[0], run)
    if leaves is None or axis is None or axis.size == 1:
        result = _quietly(tracker, run)
        if not functional:
            for one in tensors_in(list(args)):
                tracker.tape.written(one)
        return result
    written = [] if functional else [*tensors_in(args[0])]
    read = [*tensors_in(list(args if functional or name in _IN_PLACE else args[1:]))]
    site, number = call_site(), tracker.next_call(axis.global_ranks)
    nodes = [tracker.node_of(one) for one in read]
    rows = _met(tracker, axis, f"raw call {number}", nodes, (*read, *written))
    result = _quietly(tracker, run)
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


def _quietly(tracker: Tracker, run: Callable[[], Any]) -> Any:
    busy, tracker.busy = tracker.busy, True
    try:
        return run()
    finally:
        tracker.busy = busy


def _passed_on(tracker: Tracker, x: Tensor, run: Callable[[], Any]) -> Any:
    """What is waited for is what was called for."""
    found = tracker.tape.find(x)
    result = run()
    if found is not None and type(result) is Tensor:
        tracker.keep(result, found[0], patches=found[1])
    return result


def _met(
    tracker: Tracker, axis: Axis, call: str, nodes: Sequence[Node], tensors: Sequence[Tensor]
) -> list[list[Mark]]:
    """Meet the ranks of the call, each with one mark over each axis for all that it hands in."""
    row = []
    for at in range(len(tracker.axes)):
        mark = beside(call, 0, [node.marks[at] for node in nodes], linear=True)
        row.append(mark)
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
