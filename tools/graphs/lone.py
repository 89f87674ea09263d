"""A rank's part of a graph that is too large for this machine: made of what lies around it, without the other ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import gradmesh as gm
from gradmesh.autograd.rule import apply
from gradmesh.ops.neighbor import NeighborAllToAll, Picked
from gradmesh.ops.sizes import Sizes
from tools.graphs.geometry import nearest
from tools.graphs.network import Crystal


@dataclass(frozen=True, eq=False)
class Region:
    """What a plan would know on a rank."""

    rank: int
    own: Tensor  # its nodes, by number
    remote: Tensor  # the nodes whose rows it needs, by owner and then by number
    send: Tensor  # which own rows go to the other ranks, one rank after another
    sent: list[int]  # how many go to each
    received: list[int]  # how many come from each
    edge_index: Tensor  # its edges, counted in own and remote rows
    local: Crystal  # the graph of these edges


def region(points: Tensor, cell: Tensor, owner: Tensor, neighbours: int, ranks: int, rank: int) -> Region:
    """The part of a rank, of edges that are looked for only where it has nodes."""
    own = (owner == rank).nonzero().squeeze(1)
    edges, shifts = nearest(points, cell, neighbours, around=own)
    source, target = owner[edges[0]], owner[edges[1]]
    needed = (source * len(owner) + edges[0])[(target == rank) & (source != rank)].unique()
    asked = (target * len(owner) + edges[0])[(target != rank) & (source == rank)].unique()
    row = torch.full_like(owner, -1)
    remote = needed % len(owner)
    row[own], row[remote] = torch.arange(len(own)), len(own) + torch.arange(len(remote))
    mine = target == rank
    local = Crystal(points[own], cell, row[edges[:, mine]], shifts[mine])
    sent, got = (torch.bincount(each // len(owner), minlength=ranks).tolist() for each in (asked, needed))
    return Region(rank, own, remote, row[asked % len(owner)], sent, got, local.edges, local)


class LonePart:
    """What the network uses of a plan, for a `Region`."""

    def __init__(self, region: Region) -> None:
        self.own = torch.arange(len(region.own))
        self.edge_index = region.edge_index
        self.edges = torch.arange(region.edge_index.shape[1])
        inside = region.edge_index[0] < len(region.own)
        self.interior, self.boundary = inside.nonzero().squeeze(1), (~inside).nonzero().squeeze(1)
        picked = Picked(
            region.send, Sizes(tuple(region.sent)), Sizes(tuple(region.received)), len(region.own)
        )
        self._op = NeighborAllToAll(gm.axis(), 0, picked, comm_dtype=None, backward_dtype=None)

    def exchange(self, x: Tensor, *, async_op: bool = False) -> Tensor:
        """As the plan's; never beside the work."""
        if async_op:
            raise NotImplementedError("the rows of a region travel before the work")
        return torch.cat((x, apply(self._op, x)))

    def scatter_add(self, messages: Tensor, edges: Tensor | None = None) -> Tensor:
        """As the plan's."""
        target = self.edge_index[1] if edges is None else self.edge_index[1][edges]
        return messages.new_zeros(len(self.own), *messages.shape[1:]).index_add(0, target, messages)

    def pool(self, x: Tensor) -> Tensor:
        """As the plan's."""
        return gm.all_reduce(x.sum(0, keepdim=True), dst=gm.I)
