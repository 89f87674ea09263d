"""A step of energy and forces, and one of training on forces, of ranks that each hold their own nodes alone."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

import gradmesh as gm
from benchmarks.peak import peak
from gradmesh.nn.graph import GraphPlan, by_space
from tools.graphs.geometry import crystal, slab
from tools.graphs.network import Crystal, Parts, own_energy, weights, whole_energy

KINDS = ("forces", "training")
"""Energy and forces; and the gradients by the weights of a loss on the forces, which has second derivatives."""

Energy = Callable[[Tensor, list[Tensor]], Tensor]


def step_of(kind: str, energy: Energy, points: Tensor, width: int) -> Callable[[], list[Tensor]]:
    """A step."""
    at = points.clone().requires_grad_()
    leaves = [weight.requires_grad_() for weight in weights(width)]

    def step() -> list[Tensor]:
        total = energy(at, leaves)
        training = kind == "training"
        (slope,) = torch.autograd.grad(total, at, create_graph=training)
        if not training:
            return [total.detach(), slope]
        return list(torch.autograd.grad(((slope - 0.1) ** 2).sum(), leaves))

    return step


def part_step(
    kind: str, plan: Parts, graph: Crystal, width: int, *, overlap: bool = False
) -> Callable[[], list[Tensor]]:
    """The step on this rank's part."""
    return step_of(
        kind,
        lambda at, leaves: own_energy(plan, graph, at, None, leaves, overlap=overlap),
        graph.points[plan.own],
        width,
    )


_steps: dict[str, Callable[[], list[Tensor]]] = {}
"""Those of this rank, which is a process of its own, from one run of its pool to the next."""


def prepare(graph: Crystal, owner: Tensor | None, width: int) -> dict[str, int]:
    """Make this rank's steps, and weigh the first of each in a process that has made none."""
    torch.set_num_threads(1)
    if owner is None:
        for kind in KINDS:
            _steps[kind] = step_of(
                kind, lambda at, leaves: whole_energy(graph, at, None, leaves), graph.points, width
            )
    else:
        plan = GraphPlan(graph.edges, owner)
        for kind in KINDS:
            _steps[kind] = part_step(kind, plan, graph, width)
    return {kind: peak(_steps[kind], gm.barrier) for kind in KINDS}


def measure(kind: str, repeats: int) -> float:
    """Seconds of a step on this rank, from barrier to barrier."""
    gm.barrier()
    started = time.perf_counter()
    for _ in range(repeats):
        _steps[kind]()
    gm.barrier()
    return (time.perf_counter() - started) / repeats


@dataclass(frozen=True)
class Cost:
    """What the steps take on a pool of ranks."""

    backend: str  # of the ranks; "": one process, without a plan
    ranks: int  # how many there are
    # by kind, those of each round on the slowest rank
    seconds: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    # by kind, each rank's peak in bytes above what was there before
    memory: dict[str, list[int]] = field(default_factory=dict)

    def median(self, kind: str) -> float:
        """The median of the rounds."""
        return statistics.median(self.seconds[kind])


def costs(nodes: int, neighbours: int, width: int, pools: list[tuple[str, int]], rounds: int) -> list[Cost]:
    """Those of every pool."""
    points, cell = slab(nodes)
    graph = crystal(points, cell, neighbours)
    found = [Cost(*pool) for pool in pools]
    with contextlib.ExitStack() as stack:
        started = []
        for cost in found:
            ranks = stack.enter_context(
                gm.Ranks(cost.ranks, backend=cost.backend or "shm", timeout=300, prefix=False)
            )
            owner = by_space(points, cost.ranks, cell=cell) if cost.backend else None
            weighed = ranks.run(prepare, graph, owner, width)
            cost.memory.update({kind: [each[kind] for each in weighed] for kind in KINDS})
            started.append(ranks)
        for _ in range(rounds):
            for cost, ranks in zip(found, started, strict=True):
                for kind in KINDS:
                    cost.seconds[kind].append(max(ranks.run(measure, kind, 1)))
    return found
