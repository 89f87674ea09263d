"""A graph as it was given: whole on every rank, whole on one, or in parts; and what this rank needs of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gradmesh.arguments import Call, integer
from gradmesh.axis import Axis
from gradmesh.collectives import all_gather, exchange
from gradmesh.errors import MismatchError, message
from gradmesh.nn.graph.agree import device_of_root
from gradmesh.nn.graph.edges import INDEX, Fail, checked_edges, is_table, shown
from gradmesh.nn.graph.rows import Rows

__all__ = [
    "GraphInput",
    "Kind",
    "checked_own",
    "checked_owner",
    "edges_of_parts",
    "edges_of_rank",
    "failing",
    "hops_of",
    "owner_of_parts",
    "part_of_whole",
    "see_that_own_fits",
    "sent_by_root",
]

Kind = Literal["whole", "root", "parts"]


@dataclass(frozen=True, eq=False)
class GraphInput:
    """Edges in the numbers of the graph, of which the ones that end at this rank's nodes are among.

    Attributes:
        pairs: sources and targets.
        numbers: which of the given edges they are.
        whole: whether these are all edges of the graph.
    """

    pairs: Tensor
    numbers: Tensor
    whole: bool

    def ending_at(self, nodes: Tensor, rows: Rows) -> GraphInput:
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
        return GraphInput(all_of_them[:2], all_of_them[2], whole=False)

    def _picked(self, nodes: Tensor, rows: Rows) -> GraphInput:
        marked = torch.zeros(rows.nodes, dtype=torch.bool, device=nodes.device)
        marked[nodes] = True
        here = marked[self.pairs[1]].nonzero().squeeze(1)
        return GraphInput(self.pairs[:, here], self.numbers[here], whole=False)


def failing(call: Call) -> Fail:
    """What raises an error of this rank's arguments; the others hear of it in the call that follows."""

    def fail(problem: str, expected: str, got: str, remedy: str) -> None:
        call.fail(problem, expected=expected, got=got, remedy=remedy)

    return fail  # type: ignore[return-value]  # Call.fail does not return


def checked_owner(owner: object, ranks: int, fail: Fail) -> Tensor:
    """The rank of each node as int64."""
    if not is_table(owner, 1, INDEX):
        fail(
            "owner does not name a rank for each node",
            "a 1-d tensor of int64",
            shown(owner),
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


def part_of_whole(edges: Tensor) -> GraphInput:
    """Edges that every rank has."""
    return GraphInput(edges, torch.arange(edges.shape[1], device=edges.device), whole=True)


def sent_by_root(
    edges: Tensor | None, owner: Tensor | None, axis: Axis, root: int
) -> tuple[GraphInput, Tensor]:
    """The own edges and the owners of all nodes, from the rank that has them, on the kind of device that it has."""
    place = device_of_root(axis, root, edges)
    if edges is None or owner is None:
        nothing = torch.empty(0, dtype=torch.int64, device=place)
        told = exchange([nothing] * axis.size, axis)[root]
        found = exchange([nothing] * axis.size, axis)[root]
    else:
        edges, owner = (x if x.device.type == place.type else x.to(place) for x in (edges, owner))
        exchange([owner] * axis.size, axis)
        told, targets = owner, owner[edges[1]]
        order = targets.argsort(stable=True)
        listed = torch.cat((edges[:, order], order[None]))
        parts = listed.split(torch.bincount(targets, minlength=axis.size).tolist(), dim=1)
        found = exchange(list(parts), axis)[root]
    return GraphInput(found[:2], found[2], whole=False), told


def hops_of(hops: object, fail: Fail) -> int:
    """A number of layers."""
    depth = integer(hops)
    if depth is None or depth < 1:
        fail(
            "hops is no number of layers",
            "an int of 1 or more",
            f"hops={hops!r}",
            "leave it out for one layer",
        )
    return depth


def checked_own(own: object, fail: Fail) -> Tensor:
    """The numbers of this rank's nodes as int64."""
    if not is_table(own, 1, INDEX):
        fail(
            "own does not name this rank's nodes",
            "a 1-d tensor of int64",
            shown(own),
            "pass the numbers of this rank's nodes in the whole graph",
        )
    return own.long()


def see_that_own_fits(
    own: Tensor, owner: Tensor, rank: int, fail: Fail, names: tuple[str, str] = ("own", "owner")
) -> None:
    """Refuse own nodes that are not those that the owners of all nodes say; `names` are the arguments'."""
    mine = (owner == rank).nonzero().squeeze(1)
    if not torch.equal(own.to(owner.device).sort().values, mine):
        fail(
            f"{names[0]} is not what {names[1]} says",
            f"the {len(mine)} nodes that rank {rank} owns, each once",
            f"{len(own)} nodes, not just those",
            f"pass ({names[1]} == rank).nonzero().squeeze(1), in any order",
        )


def owner_of_parts(own: Tensor, axis: Axis, verb: str) -> Tensor:
    """The rank of each node, where each rank told its own."""
    ids = all_gather(own, axis, sizes="auto")
    counts = all_gather(torch.tensor([len(own)], device=own.device), axis)
    # From here on every rank sees the same, and raises the same.
    nodes = len(ids)
    if nodes and (int(ids.min()) < 0 or int(ids.max()) >= nodes or len(ids.unique()) < nodes):
        held = torch.bincount(ids.clamp(0, nodes - 1), minlength=nodes)
        wrong = (held != 1).nonzero().squeeze(1)
        call_error = message(
            "the ranks' own nodes are not the nodes of a graph, each once",
            op=verb,
            axis=str(axis),
            expected=f"the numbers 0 to {nodes - 1}, each on one rank",
            got=f"numbers from {int(ids.min())} to {int(ids.max())}; not there once: {wrong[:5].tolist()}",
            remedy="count nodes over the whole graph, and give each to one rank",
        )
        raise MismatchError(call_error)
    owner = torch.empty(nodes, dtype=torch.int64, device=ids.device)
    owner[ids] = torch.arange(axis.size, device=ids.device).repeat_interleave(counts)
    return owner


def edges_of_rank(edges: object, owner: Tensor, rank: int, fail: Fail) -> Tensor:
    """Edges that all end at a rank's nodes, as int64, where the owners are."""
    pairs = checked_edges(edges, len(owner), fail).to(owner.device)
    foreign = (owner[pairs[1]] != rank).nonzero().squeeze(1)
    if len(foreign):
        fail(
            "an edge ends at a node of another rank",
            f"targets that rank {rank} owns",
            f"{len(foreign)} of {pairs.shape[1]} edges with others, the first {pairs[:, foreign[0]].tolist()}",
            "give each edge to the rank that owns its target",
        )
    return pairs


def edges_of_parts(edges: object, rows: Rows, hops: int, call: Call) -> GraphInput:
    """The edges that each rank told of its own nodes."""
    pairs = edges_of_rank(edges, rows.owner, rows.axis.rank, failing(call))
    first = 0
    if hops > 1:
        each = all_gather(torch.tensor([pairs.shape[1]], device=pairs.device), rows.axis)
        first = int(each[: rows.axis.rank].sum())
    return GraphInput(pairs, torch.arange(first, first + pairs.shape[1], device=pairs.device), whole=False)
