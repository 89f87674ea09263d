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

Partition = Literal["bisection", "curve", "count"]


@dataclass(frozen=True)
class Job:
    """What is measured."""

    nodes: int  # the number of nodes
    neighbours: int  # the edges that end at each
    width: int  # of the rows
    ranks: int  # how many there are
    empty: bool  # whether the last of them owns nothing
    partition: Partition  # how the nodes are cut
    compared: bool  # whether the network is run, here and on one process


@dataclass(frozen=True)
class Part:
    """What was seen on a rank."""

    own: int  # the rows that it owns
    remote: int  # the rows that it gets
    sent: int  # the rows that it sends in an exchange
    gathered: int  # the rows that it would send in a whole gather
    building: float  # seconds for the plan
    rebuilding: float  # seconds for it when the edges change
    # by name, the largest difference from one process, relative to the largest value there
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
