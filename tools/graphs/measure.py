"""What the ranks send, and how far their results are from those of one process."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

import gradmesh as gm
from gradmesh.nn.graph import GraphPlan, by_count, by_space
from tools.graphs.geometry import crystal, slab
from tools.graphs.network import Crystal, Figures, dense, in_parts, weights

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
    graph = crystal(points, cell, job.neighbours)
    given, parts = weights(job.width), job.ranks - job.empty
    if job.partition == "count":
        owner = by_count(job.nodes, parts)
    else:
        owner = by_space(points, parts, cell=cell, method=job.partition)
    right = dense(graph, given) if job.compared else None
    return gm.launch(_on_rank, job.ranks, backend=backend, args=(graph, owner, given, right))


def _on_rank(graph: Crystal, owner: Tensor, given: list[Tensor], right: Figures | None) -> Part:
    started = time.perf_counter()
    plan = GraphPlan(graph.edges, owner)
    built = time.perf_counter()
    plan = plan.rebuilt(graph.edges)
    rebuilt = time.perf_counter()
    return Part(
        len(plan.own),
        len(plan.remote),
        plan.rows_sent,
        plan.rows_of_gather,
        built - started,
        rebuilt - built,
        {} if right is None else _deviations(in_parts(plan, graph, given), right),
    )


def _deviations(found: Figures, right: Figures) -> dict[str, float]:
    def named(figures: Figures) -> dict[str, Tensor]:
        second = {f"second derivatives {name}": slope for name, slope in figures.slopes.items()}
        return {"value": figures.energy, "forces": figures.forces, "stress": figures.stress, **second}

    pairs = zip(named(found).items(), named(right).values(), strict=True)
    return {name: float((got - wanted).abs().max() / wanted.abs().max()) for (name, got), wanted in pairs}
