"""What a step takes on more ranks than there are here, by the simulator; and how right it is where there are enough."""

from __future__ import annotations

import functools
import itertools
import os
from dataclasses import dataclass

import torch
from torch import Tensor

import gradmesh as gm
from gradmesh.nn.graph import GraphPlan, by_space
from gradmesh.verify import CostModel, Link, Simulation, simulate
from tools.graphs.geometry import crystal, slab
from tools.graphs.lone import LonePart, Region, region
from tools.graphs.network import Crystal
from tools.graphs.steps import part_step

__all__ = ["NETWORK", "Predicted", "at_scale", "beside_measured"]

NETWORK = Link(latency_us=10, gbytes_per_s=25)
"""Ranks that reach each other through a network."""
_WARM = 2


@dataclass(frozen=True)
class Predicted:
    """A step of the slowest of the ranks that were played.

    Attributes:
        ranks: how many there are.
        nodes: of the graph.
        remote: the rows that the rank needs of others.
        work: seconds of its own work, on a core of this machine.
        direct: seconds of its calls, if all ranks reach each other at once.
        in_rounds: the same by the faster of ring and tree.
    """

    ranks: int
    nodes: int
    remote: int
    work: float
    direct: float
    in_rounds: float


def _lone_steps(part: Region, kind: str, width: int, repeats: int) -> None:
    step = part_step(kind, LonePart(part), part.local, width)
    for _ in range(repeats + _WARM):
        gm.barrier()
        step()
    gm.barrier()


def _plan_steps(graph: Crystal, owner: Tensor, kind: str, width: int, repeats: int) -> None:
    step = part_step(kind, GraphPlan(graph.edges, owner), graph, width)
    for _ in range(repeats + _WARM):
        gm.barrier()
        step()
    gm.barrier()


def _fastest(run: Simulation[None], rank: int) -> tuple[float, float]:
    """Seconds from barrier to barrier, and those of them in which a call was under way."""
    events = run.events.select(rank=rank)
    barriers = [place for place, event in enumerate(events) if event.op == "barrier"][_WARM:]
    found = []
    for before, after in itertools.pairwise(barriers):
        # From when all have come to the barrier to when this rank comes to the next.
        whole = events[after].called - (events[before].end or events[before].called)
        found.append((whole, sum((e.end or 0) - (e.start or 0) for e in events[before + 1 : after])))
    return min(found)


@functools.lru_cache(16)
def _regions(nodes: int, neighbours: int, ranks: int, played: int) -> list[Region]:
    """The parts of some ranks of a slab."""
    points, cell = slab(nodes)
    owner = by_space(points, ranks, cell=cell)
    every = sorted({ranks * place // played for place in range(played)})
    return [region(points, cell, owner, neighbours, ranks, rank) for rank in every]


def at_scale(
    nodes: int, neighbours: int, width: int, ranks: int, kind: str, repeats: int = 4, played: int = 3
) -> Predicted:
    """A step on a slab, some of its ranks played one at a time.

    Args:
        nodes: of the slab.
        neighbours: the edges that end at each.
        width: of the network.
        ranks: how many the slab is cut over.
        kind: of step.
        repeats: the steps that are timed, of which the fastest counts.
        played: how many ranks are played, of which the slowest counts.
    """
    found = []
    for part in _regions(nodes, neighbours, ranks, played):
        seconds = {}
        for algorithm in ("direct", "fastest"):
            run = simulate(
                _lone_steps,
                ranks,
                args=(part, kind, width, repeats),
                only=part.rank,
                model=CostModel(NETWORK, algorithm),  # type: ignore[arg-type]
            )
            seconds[algorithm] = _fastest(run, part.rank)
        work = min(whole - calls for whole, calls in seconds.values())
        calls = [each[1] for each in seconds.values()]
        found.append(Predicted(ranks, nodes, len(part.remote), work, *calls))
    return max(found, key=lambda each: each.work + each.direct)


def beside_measured(
    nodes: int, neighbours: int, width: int, ranks: int, kind: str, link: Link, repeats: int = 4
) -> float:
    """The seconds that the simulator says of a step on this machine, all ranks played.

    Where there are more ranks than cores, work takes so many times as long.
    """
    points, cell = slab(nodes)
    graph, owner = crystal(points, cell, neighbours), by_space(points, ranks, cell=cell)
    shared = max(1.0, ranks / len(os.sched_getaffinity(0)))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        run = simulate(
            _plan_steps,
            ranks,
            args=(graph, owner, kind, width, repeats),
            seed=0,
            model=CostModel(link, "direct"),
            compute=shared,
        )
    finally:
        torch.set_num_threads(threads)
    return max(_fastest(run, rank)[0] for rank in range(ranks))
