"""What the ranks send, and how far their results are from those of one process."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

import gradmesh as gm
from gradmesh.nn.graph import GraphPlan, by_count, by_space
from tools.graphs.geometry import nearest, slab
from tools.graphs.network import dense, in_parts, weights

__all__ = ["Job", "Part", "measured"]

Partition = Literal["bisection", "curve", "count"]


@dataclass(frozen=True)
class Job:
    """What is measured.

    Attributes:
        nodes: the number of nodes.
        neighbours: the edges that end at each.
        width: of the rows.
        ranks: how many there are.
        empty: whether the last of them owns nothing.
        partition: how the nodes are cut.
        compared: whether the network is run, here and on one process.
    """

    nodes: int
    neighbours: int
    width: int
    ranks: int
    empty: bool
    partition: Partition
    compared: bool


@dataclass(frozen=True)
class Part:
    """What was seen on a rank.

    Attributes:
        own: the rows that it owns.
        remote: the rows that it gets.
        sent: the rows that it sends in an exchange.
        gathered: the rows that it would send in a whole gather.
        building: seconds for the plan.
        rebuilding: seconds for it when the edges change.
        deviations: by name, the largest difference from one process, relative to the largest value there.
    """

    own: int
    remote: int
    sent: int
    gathered: int
    building: float
    rebuilding: float
    deviations: dict[str, float]


def measured(job: Job, backend: str) -> list[Part]:
    """Each rank's part."""
    points, cell = slab(job.nodes)
    edges, images = nearest(points, cell, job.neighbours)
    given, parts = weights(job.width), job.ranks - job.empty
    if job.partition == "count":
        owner = by_count(job.nodes, parts)
    else:
        owner = by_space(points, parts, cell=cell, method=job.partition)
    right = dense(points, edges, images, given) if job.compared else None
    expected = [] if right is None else [right.energy, right.forces, *right.slopes]
    return gm.launch(
        _on_rank, job.ranks, backend=backend, args=(points, edges, images, owner, given, expected)
    )


def _on_rank(
    points: Tensor, edges: Tensor, images: Tensor, owner: Tensor, given: list[Tensor], expected: list[Tensor]
) -> Part:
    begun = time.perf_counter()
    plan = GraphPlan(edges, owner)
    built = time.perf_counter()
    plan = plan.rebuilt(edges)
    rebuilt = time.perf_counter()
    deviations = {}
    if expected:
        found = in_parts(plan, points, images, given)
        names = ["value", "forces", "second derivatives"]
        pairs = zip([found.energy, found.forces, *found.slopes], expected, strict=True)
        each = [float((got - right).abs().max() / right.abs().max()) for got, right in pairs]
        deviations = dict(zip(names, [*each[:2], max(each[2:])], strict=True))
    return Part(
        len(plan.own),
        len(plan.remote),
        plan.rows_sent,
        plan.rows_of_gather,
        built - begun,
        rebuilt - built,
        deviations,
    )
