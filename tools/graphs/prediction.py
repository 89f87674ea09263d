"""What a step takes on more ranks than there are here, by the simulator; and how right it is where there are enough.

A step is its work and its calls. Work is that of a graph of as many nodes on one rank, in CPU time, so that others on
the machine do not count; it is measured at some sizes, and on a line between them. Calls are the simulator's alone.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import gradmesh as gm
from gradmesh.autograd.rule import apply
from gradmesh.nn.graph import GraphPlan, by_space
from gradmesh.ops.neighbor import NeighborAllToAll, Picked
from gradmesh.ops.sizes import Sizes
from gradmesh.verify import CostModel, Link, Simulation, simulate
from gradmesh.verify.simulator.costs import Algorithm
from tools.graphs.geometry import crystal, nearest, slab
from tools.graphs.network import Crystal
from tools.graphs.steps import part_step


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


NETWORK = Link(latency_us=10, gbytes_per_s=25)
"""Ranks that reach each other through a network."""
_ALGORITHMS: tuple[Algorithm, ...] = ("direct", "fastest")
SIZES = (500, 2_000, 5_000, 10_000, 20_000)
"""The numbers of nodes at which work is measured."""


@dataclass(frozen=True)
class Work:
    """Seconds of a step's work by the number of nodes, measured at some of them."""

    measured: dict[int, float]  # the seconds by the number of nodes, at two or more

    def of(self, nodes: int) -> float:
        """On the line between the two sizes around it, or through the two that are nearest.

        >>> Work({10: 2.0, 20: 3.0, 40: 4.0}).of(15), Work({10: 2.0, 20: 3.0, 40: 4.0}).of(0)
        (2.5, 1.0)
        """
        sizes = sorted(self.measured)
        upper = next((place for place, size in enumerate(sizes) if place and size >= nodes), len(sizes) - 1)
        low, high = sizes[upper - 1], sizes[upper]
        slope = (self.measured[high] - self.measured[low]) / (high - low)
        return self.measured[low] + slope * (nodes - low)


def worked(kind: str, neighbours: int, width: int, sizes: Sequence[int] = SIZES, repeats: int = 9) -> Work:
    """Measure it, on one rank that has the whole graph, with one thread: the least of some steps."""
    seconds = gm.launch(_work, 1, backend="shm", args=(kind, neighbours, width, tuple(sizes), repeats))
    return Work(seconds[0])


def _work(kind: str, neighbours: int, width: int, sizes: tuple[int, ...], repeats: int) -> dict[int, float]:
    torch.set_num_threads(1)
    found = {}
    for nodes in sizes:
        points, cell = slab(nodes)
        graph = crystal(points, cell, neighbours)
        step = part_step(kind, GraphPlan(graph.edges, by_space(points, 1)), graph, width)
        step()
        times = []
        for _ in range(repeats):
            start = time.process_time()
            step()
            times.append(time.process_time() - start)
        found[nodes] = min(times)
    return found


@dataclass(frozen=True)
class Predicted:
    """A step of the slowest of the ranks that were played."""

    ranks: int  # how many there are
    nodes: int  # of the graph
    own: int  # the nodes of the rank
    remote: int  # the rows that it needs of others
    direct: float  # seconds of its calls, if all ranks reach each other at once
    in_rounds: float  # the same by the faster of ring and tree


def _lone_step(part: Region, kind: str, width: int) -> None:
    step = part_step(kind, LonePart(part), part.local, width)
    gm.barrier()
    step()
    gm.barrier()


def _plan_step(graph: Crystal, owner: Tensor, kind: str, width: int) -> None:
    step = part_step(kind, GraphPlan(graph.edges, owner), graph, width)
    gm.barrier()
    step()
    gm.barrier()


def _calls(run: Simulation[None], rank: int) -> float:
    """Seconds from the last barrier but one to the last, in which only calls take time."""
    (before, after) = [event for event in run.events.select(rank=rank) if event.op == "barrier"][-2:]
    return after.called - (before.end or before.called)


@functools.lru_cache(16)
def _regions(nodes: int, neighbours: int, ranks: int, played: int) -> list[Region]:
    """The parts of some ranks of a slab."""
    points, cell = slab(nodes)
    owner = by_space(points, ranks, cell=cell)
    every = sorted({ranks * place // played for place in range(played)})
    return [region(points, cell, owner, neighbours, ranks, rank) for rank in every]


def at_scale(nodes: int, neighbours: int, width: int, ranks: int, kind: str, played: int = 3) -> Predicted:
    """A step on a slab, some of its ranks played one at a time."""
    found = []
    for part in _regions(nodes, neighbours, ranks, played):
        direct, in_rounds = (
            _calls(
                simulate(
                    _lone_step,
                    ranks,
                    args=(part, kind, width),
                    only=part.rank,
                    model=CostModel(NETWORK, algorithm),
                    compute=0,
                ),
                part.rank,
            )
            for algorithm in _ALGORITHMS
        )
        found.append(Predicted(ranks, nodes, len(part.own), len(part.remote), direct, in_rounds))
    return max(found, key=lambda each: (each.own, each.direct))


def beside_measured(
    nodes: int, neighbours: int, width: int, ranks: int, kind: str, link: Link, work: Work
) -> float:
    """The seconds of a step on this machine, all ranks played.

    Where there are more ranks than cores, work takes so many times as long.
    """
    points, cell = slab(nodes)
    graph, owner = crystal(points, cell, neighbours), by_space(points, ranks, cell=cell)
    run = simulate(
        _plan_step,
        ranks,
        args=(graph, owner, kind, width),
        seed=0,
        model=CostModel(link, "direct"),
        compute=0,
    )
    shared = max(1.0, ranks / len(os.sched_getaffinity(0)))
    return shared * work.of(-(-nodes // ranks)) + max(_calls(run, rank) for rank in range(ranks))
