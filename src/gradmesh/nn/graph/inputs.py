"""Checked graph arguments: the full graph on every rank, the full graph on one rank, or one part on each rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gradmesh.errors import MismatchError, message
from gradmesh.nn.graph.agree import device_of_root
from gradmesh.nn.graph.edges import INDEX, Fail, checked_edges, is_table, shown
from gradmesh.nn.graph.rows import Rows
from gradmesh.runtime.mesh import Axis
from gradmesh.verbs.call import Call, integer
from gradmesh.verbs.collectives import all_gather, exchange

__all__ = [
    "GraphInput",
    "Kind",
    "check_own_matches",
    "checked_own",
    "checked_owner",
    "edges_of_parts",
    "edges_of_rank",
    "failing",
    "hops_of",
    "owner_of_parts",
    "sent_by_root",
]

Kind = Literal["whole", "root", "parts"]


@dataclass(frozen=True, eq=False)
class GraphInput:
    """Edges in global node indices, at least those that end at this rank's nodes.

    Attributes:
        pairs: sources and targets.
        numbers: the indices of the edges in the given list.
        whole: True if these are all edges of the graph.
    """

    pairs: Tensor
    numbers: Tensor
    whole: bool

    def ending_at(self, nodes: Tensor, rows: Rows) -> GraphInput:
        """The edges that end at some nodes; a collective, unless every rank has all edges."""
        if self.whole:
            return self._picked(nodes, rows)
        owners = rows.owner[nodes]
        order = owners.argsort(stable=True)
        requests = nodes[order].split(torch.bincount(owners, minlength=rows.axis.size).tolist())
        wanted = exchange(list(requests), rows.axis)
        found = [self._picked(each, rows) for each in wanted]
        received = exchange([torch.cat((one.pairs, one.numbers[None])) for one in found], rows.axis)
        joined = torch.cat(received, dim=1)
        return GraphInput(joined[:2], joined[2], whole=False)

    def _picked(self, nodes: Tensor, rows: Rows) -> GraphInput:
        marked = torch.zeros(rows.nodes, dtype=torch.bool, device=nodes.device)
        marked[nodes] = True
        here = marked[self.pairs[1]].nonzero().squeeze(1)
        return GraphInput(self.pairs[:, here], self.numbers[here], whole=False)


def failing(call: Call) -> Fail:
    """`call.fail` with positional arguments."""

    def fail(problem: str, expected: str, got: str, remedy: str) -> None:
        call.fail(problem, expected=expected, got=got, remedy=remedy)

    return fail  # type: ignore[return-value]  # Call.fail does not return


def checked_owner(owner: object, ranks: int, fail: Fail) -> Tensor:
    """The rank of each node as int64."""
    if not is_table(owner, 1, INDEX):
        fail(
            "owner is not a 1-d integer tensor",
            "the rank of each node, int64",
            shown(owner),
            f"pass e.g. owner=gm.nn.graph.by_count(nodes, {ranks}), by_space(...) or a custom assignment",
        )
    if owner.numel() and (int(owner.min()) < 0 or int(owner.max()) >= ranks):
        fail(
            "owner has ranks out of range",
            f"0 <= rank < {ranks}",
            f"ranks from {int(owner.min())} to {int(owner.max())}",
            f"partition the graph into {ranks} parts, gm.world_size(axis)",
        )
    return owner.to(torch.int64, copy=True)  # the caller may overwrite the argument


def sent_by_root(
    edges: Tensor | None, owner: Tensor | None, axis: Axis, root: int
) -> tuple[GraphInput, Tensor]:
    """This rank's edges and the owners of all nodes, from the root, on the root's kind of device."""
    device = device_of_root(axis, root, edges)
    if edges is None or owner is None:
        empty = torch.empty(0, dtype=torch.int64, device=device)
        owners = exchange([empty] * axis.size, axis)[root]
        found = exchange([empty] * axis.size, axis)[root]
    else:
        edges, owner = (x if x.device.type == device.type else x.to(device) for x in (edges, owner))
        exchange([owner] * axis.size, axis)
        owners, targets = owner, owner[edges[1]]
        order = targets.argsort(stable=True)
        listed = torch.cat((edges[:, order], order[None]))
        parts = listed.split(torch.bincount(targets, minlength=axis.size).tolist(), dim=1)
        found = exchange(list(parts), axis)[root]
    return GraphInput(found[:2], found[2], whole=False), owners


def hops_of(hops: object, fail: Fail) -> int:
    """`hops` as an int >= 1."""
    depth = integer(hops)
    if depth is None or depth < 1:
        fail(
            "hops must be a positive int",
            "the number of layers that an exchange serves, e.g. hops=2",
            f"hops={hops!r}",
            "omit it for one layer",
        )
    return depth


def checked_own(own: object, fail: Fail) -> Tensor:
    """The indices of this rank's nodes as int64."""
    if not is_table(own, 1, INDEX):
        fail(
            "own is not a 1-d integer tensor",
            "the global indices of this rank's nodes, int64",
            shown(own),
            "pass e.g. own=torch.tensor([0, 1, 5])",
        )
    return own.long()


def check_own_matches(
    own: Tensor, owner: Tensor, rank: int, fail: Fail, names: tuple[str, str] = ("own", "owner")
) -> None:
    """Raise if `own` does not have exactly the nodes of this rank; `names` are the arguments' names."""
    local = (owner == rank).nonzero().squeeze(1)
    if not torch.equal(own.to(owner.device).sort().values, local):
        fail(
            f"{names[0]} does not match {names[1]}",
            f"the {len(local)} nodes that rank {rank} owns, each once",
            f"{len(own)} nodes, which differ from these",
            f"pass ({names[1]} == {rank}).nonzero().squeeze(1), in any order",
        )


def owner_of_parts(own: Tensor, axis: Axis, verb: str) -> Tensor:
    """The rank of each node, from each rank's nodes."""
    ids = all_gather(own, axis, sizes="auto")
    counts = all_gather(torch.tensor([len(own)], device=own.device), axis)
    # All ranks have the same data from here on, and raise the same error.
    nodes = len(ids)
    if nodes and (int(ids.min()) < 0 or int(ids.max()) >= nodes or len(ids.unique()) < nodes):
        held = torch.bincount(ids.clamp(0, nodes - 1), minlength=nodes)
        wrong = (held != 1).nonzero().squeeze(1)
        call_error = message(
            "the ranks' own= do not contain every node exactly once",
            op=verb,
            axis=str(axis),
            expected=f"the global indices 0 to {nodes - 1}, each on exactly one rank",
            got=f"indices from {int(ids.min())} to {int(ids.max())}; missing or repeated: {wrong[:5].tolist()}",
            remedy="use global node indices, and assign each node to one rank",
        )
        raise MismatchError(call_error)
    owner = torch.empty(nodes, dtype=torch.int64, device=ids.device)
    owner[ids] = torch.arange(axis.size, device=ids.device).repeat_interleave(counts)
    return owner


def edges_of_rank(edges: object, owner: Tensor, rank: int, fail: Fail) -> Tensor:
    """Checked edges that all end at a rank's nodes, on the device of `owner`."""
    pairs = checked_edges(edges, len(owner), fail).to(owner.device)
    foreign = (owner[pairs[1]] != rank).nonzero().squeeze(1)
    if len(foreign):
        fail(
            "an edge ends at a node of another rank",
            f"targets that rank {rank} owns",
            f"{len(foreign)} of {pairs.shape[1]} edges with other targets, e.g. {pairs[:, foreign[0]].tolist()}",
            "pass each edge on the rank that owns its target",
        )
    return pairs


def edges_of_parts(edges: object, rows: Rows, hops: int, call: Call) -> GraphInput:
    """The graph from each rank's edges."""
    pairs = edges_of_rank(edges, rows.owner, rows.axis.rank, failing(call))
    first = 0
    if hops > 1:
        each = all_gather(torch.tensor([pairs.shape[1]], device=pairs.device), rows.axis)
        first = int(each[: rows.axis.rank].sum())
    return GraphInput(pairs, torch.arange(first, first + pairs.shape[1], device=pairs.device), whole=False)
