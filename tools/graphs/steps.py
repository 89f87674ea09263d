"""A step of energy and forces, and one of training on forces, of ranks that each hold their own nodes alone."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

import gradmesh as gm
from benchmarks.peak import peak
from gradmesh.nn.graph import GraphPlan
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
