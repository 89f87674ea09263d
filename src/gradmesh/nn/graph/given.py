"""A graph as it was given: whole on every rank, whole on one, or in parts; and what this rank needs of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gradmesh.arguments import Call
from gradmesh.axis import Axis
from gradmesh.collectives import all_gather, exchange
from gradmesh.errors import MismatchError, message
from gradmesh.nn.graph.edges import Fail, checked_edges
from gradmesh.nn.graph.rows import Rows

__all__ = [
    "Given",
    "Kind",
    "agree",
    "checked_owner",
    "checksum",
    "edges_of_parts",
    "failing",
    "owner_of_parts",
    "part_of_whole",
    "sent_by_root",
]

Kind = Literal["whole", "root", "parts"]

_STEP, *_MIX = (number - (1 << 64) for number in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
"""The numbers of splitmix64 as int64 (Steele, Lea and Flood, Fast splittable pseudorandom number generators, 2014)."""


@dataclass(frozen=True, eq=False)
class Given:
    """Edges in the numbers of the graph, of which the ones that end at this rank's nodes are among.

    Attributes:
        pairs: sources and targets.
        numbers: which of the given edges they are.
        whole: whether these are all edges of the graph.
    """

    pairs: Tensor
    numbers: Tensor
    whole: bool

    def ending_at(self, nodes: Tensor, rows: Rows) -> Given:
        """The edges that end at some nodes. Every rank calls it, unless every rank has all edges."""
        if self.whole:
            return self._picked(nodes, rows)
        owners = rows.owner[nodes]
        order = owners.argsort(stable=True)
        asked = nodes[order].split(torch.bincount(owners, minlength=rows.axis.size).tolist())
        wanted = exchange(list(asked), rows.axis)
        found = [self._picked(each, rows) for each in wanted]
        told = exchange([torch.cat((one.pairs, one.numbers[None])) for one in found], rows.axis)
        all_of_them = torch.cat(told, dim=1)
        return Given(all_of_them[:2], all_of_them[2], whole=False)

    def _picked(self, nodes: Tensor, rows: Rows) -> Given:
        marked = torch.zeros(rows.nodes, dtype=torch.bool, device=nodes.device)
        marked[nodes] = True
        here = marked[self.pairs[1]].nonzero().squeeze(1)
        return Given(self.pairs[:, here], self.numbers[here], whole=False)


def failing(call: Call) -> Fail:
    """What raises an error of this rank's arguments; the others hear of it in the call that follows."""

    def fail(problem: str, expected: str, got: str, remedy: str) -> None:
        call.fail(problem, expected=expected, got=got, remedy=remedy)

    return fail  # type: ignore[return-value]  # Call.fail does not return


def checked_owner(owner: object, ranks: int, fail: Fail) -> Tensor:
    """The rank of each node as int64."""
    plain = isinstance(owner, Tensor) and owner.dim() == 1
    if not isinstance(owner, Tensor) or not plain or owner.dtype not in (torch.int64, torch.int32):
        got = f"{owner.dtype}{list(owner.shape)}" if isinstance(owner, Tensor) else type(owner).__name__
        fail(
            "owner does not name a rank for each node",
            "a 1-d tensor of int64",
            got,
            "use gradmesh.nn.graph.by_count(nodes, ranks), by_space or an assignment of your own",
        )
    if owner.numel() and (int(owner.min()) < 0 or int(owner.max()) >= ranks):
        fail(
            "owner names ranks that are not on the axis",
            f"0 <= rank < {ranks}",
            f"ranks from {int(owner.min())} to {int(owner.max())}",
            "cut the graph for the ranks of this axis, gm.world_size(axis)",
        )
    return owner.to(torch.int64, copy=True)  # a plan's own: what was given may be written over


def agree(axis: Axis, verb: str, words: str, numbers: list[int], *tensors: Tensor) -> None:
    """See that the ranks were told the same.

    Args:
        axis: the ranks.
        verb: who asks.
        words: what is compared, for the error.
        numbers: some numbers.
        tensors: some tensors of int64; of these the shapes and a checksum are compared.
    """
    told = list(numbers)
    device = tensors[0].device if tensors else torch.device("cpu")
    for x in tensors:
        told += [*x.shape, checksum(x)]
    if axis.size == 1:
        return
    rows = all_gather(torch.tensor([told], device=device), axis).tolist()
    differing = [rank for rank, row in enumerate(rows) if row != rows[0]]
    if differing:
        raise MismatchError(
            message(
                "the ranks were told different things",
                op=verb,
                axis=str(axis),
                expected=f"the same {words} on every rank",
                got=f"others on rank {', '.join(map(str, differing))} than on rank 0",
                remedy="make them on one rank and broadcast them, or make them alike on all",
            )
        )


def checksum(numbers: Tensor) -> int:
    """A number made of all numbers of an int64 tensor and of their places."""
    mixed = numbers.reshape(-1) + torch.arange(numbers.numel(), device=numbers.device) * _STEP
    # A sum of products alone is the same for 0, 1, 1, 0 and 1, 0, 0, 1.
    for shift, factor in zip((30, 27), _MIX, strict=True):
        mixed = (mixed ^ (mixed >> shift)) * factor
    return int((mixed ^ (mixed >> 31)).sum())


def part_of_whole(edges: Tensor) -> Given:
    """Edges that every rank has."""
    return Given(edges, torch.arange(edges.shape[1], device=edges.device), whole=True)


def sent_by_root(edges: Tensor | None, owner: Tensor | None, axis: Axis, root: int) -> tuple[Given, Tensor]:
    """The own edges and the owners of all nodes, from the rank that has them."""
    if edges is None or owner is None:
        nothing = torch.empty(0, dtype=torch.int64)
        told = exchange([nothing] * axis.size, axis)[root]
        found = exchange([nothing] * axis.size, axis)[root]
    else:
        exchange([owner] * axis.size, axis)
        told, targets = owner, owner[edges[1]]
        order = targets.argsort(stable=True)
        listed = torch.cat((edges[:, order], order[None]))
        parts = listed.split(torch.bincount(targets, minlength=axis.size).tolist(), dim=1)
        found = exchange(list(parts), axis)[root]
    return Given(found[:2], found[2], whole=False), told


def owner_of_parts(own: object, axis: Axis, call: Call) -> Tensor:
    """The rank of each node, where each rank told its own."""
    if not isinstance(own, Tensor) or own.dim() != 1 or own.dtype not in (torch.int64, torch.int32):
        shown = f"{own.dtype}{list(own.shape)}" if isinstance(own, Tensor) else type(own).__name__
        call.fail(
            "own does not name this rank's nodes",
            expected="a 1-d tensor of int64",
            got=shown,
            remedy="pass the numbers of this rank's nodes in the whole graph",
        )
    ids = all_gather(own.long(), axis, sizes="auto")
    counts = all_gather(torch.tensor([len(own)], device=own.device), axis)
    # From here on every rank sees the same, and raises the same.
    nodes = len(ids)
    if nodes and (int(ids.min()) < 0 or int(ids.max()) >= nodes or len(ids.unique()) < nodes):
        held = torch.bincount(ids.clamp(0, nodes - 1), minlength=nodes)
        wrong = (held != 1).nonzero().squeeze(1)
        call_error = message(
            "the ranks' own nodes are not the nodes of a graph, each once",
            op=call.verb,
            axis=str(axis),
            expected=f"the numbers 0 to {nodes - 1}, each on one rank",
            got=f"numbers from {int(ids.min())} to {int(ids.max())}; not there once: {wrong[:5].tolist()}",
            remedy="count nodes over the whole graph, and give each to one rank",
        )
        raise MismatchError(call_error)
    owner = torch.empty(nodes, dtype=torch.int64, device=ids.device)
    owner[ids] = torch.arange(axis.size, device=ids.device).repeat_interleave(counts)
    return owner


def edges_of_parts(edges: object, rows: Rows, hops: int, call: Call) -> Given:
    """The edges that each rank told of its own nodes."""
    fail = failing(call)
    pairs = checked_edges(edges, rows.nodes, fail)
    foreign = (rows.owner[pairs[1]] != rows.axis.rank).nonzero().squeeze(1)
    if len(foreign):
        fail(
            "an edge ends at a node of another rank",
            f"targets that rank {rows.axis.rank} owns",
            f"{len(foreign)} of {pairs.shape[1]} edges with others, the first {pairs[:, foreign[0]].tolist()}",
            "give each edge to the rank that owns its target",
        )
    first = 0
    if hops > 1:
        each = all_gather(torch.tensor([pairs.shape[1]], device=pairs.device), rows.axis)
        first = int(each[: rows.axis.rank].sum())
    return Given(pairs, torch.arange(first, first + pairs.shape[1], device=pairs.device), whole=False)
