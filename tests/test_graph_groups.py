"""Plans in groups of some ranks, and what a rank works on while the gradients of rows travel."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import gradmesh as gm
from gradmesh.nn.graph import GraphPlan, by_count
from gradmesh.verify import Link, timeline
from tests.conftest import Run
from tests.graph_programs import Graph, Program, dense_energy, energy, graph_of, owner_of, training_loss

Ranks = Callable[[int], Run]

GROUPS = ((1, 3), (0, 2, 4))


def program_of(number: int) -> Program:
    """Each group has a graph of its own."""
    return Program(seed=number, nodes=9 + number, partition="random", readout="pool")


def derivatives(graph: Graph, energies: Callable[[Tensor, list[Tensor]], Tensor]) -> list[Tensor]:
    at = graph.positions.clone().requires_grad_()
    weights = [weight.clone().requires_grad_() for weight in graph.weights]
    found = energies(at, weights)
    (slope,) = torch.autograd.grad(found.sum(), at, create_graph=True)
    gradients = torch.autograd.grad(training_loss(found, -slope), [at, *weights])
    return [found.detach(), -slope.detach(), *gradients]


def in_groups() -> float:
    """The largest deviation of this rank's group from one process."""
    made = [dist.new_group(list(ranks)) for ranks in GROUPS]
    number = next(number for number, ranks in enumerate(GROUPS) if dist.get_rank() in ranks)
    program, group = program_of(number), made[number]
    graph = graph_of(program)
    plan = GraphPlan(graph.edges, owner_of(program, graph, len(GROUPS[number])), group)
    found = derivatives(
        graph, lambda at, weights: energy(program, plan, graph, at, list(gm.replicate(tuple(weights), group)))
    )
    right = derivatives(graph, lambda at, weights: dense_energy(graph, at, weights, program.structures))
    return max(float((one - other).abs().max()) for one, other in zip(found, right, strict=True))


def test_groups_of_some_ranks_have_the_second_derivatives_of_one_process(threads: Ranks) -> None:
    assert max(threads(5)(in_groups)) < 1e-10


class Marked(torch.autograd.Function):
    """Work whose gradient takes 10 ms; it notes when that is made."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, noted: list[float]) -> Tensor:
        ctx.noted = noted
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        time.sleep(0.01)
        ctx.noted.append(time.perf_counter())
        return grad.clone(), None


def meanwhile(async_op: bool) -> bool:
    """Whether the gradients of the interior edges are made while those of the rows travel."""
    ring, noted = torch.arange(8), list[float]()
    plan = GraphPlan(torch.stack((ring, (ring + 1) % 8)), by_count(8, gm.world_size()))
    source, inside, outside = plan.edge_index[0], plan.interior, plan.boundary
    x = torch.randn(len(plan.own), 2, generator=torch.Generator().manual_seed(gm.rank())).requires_grad_()
    with gm.verify.delayed(Link(500_000, 1)), timeline() as line:
        started: Any = plan.exchange(x, async_op=async_op)
        sums = plan.scatter_add(Marked.apply(x[source[inside]], noted), inside)
        rows = started.wait() if async_op else started
        sums = sums + plan.scatter_add(rows[source[outside]], outside)
        ((1 + gm.rank()) * sums**2).sum().backward()
    (back,) = line.events.select(phase="backward")
    return (back.start or 0) < noted[0] - line.started < (back.end or 0)


@pytest.mark.timed
def test_interior_edges_are_worked_on_while_the_gradients_of_rows_travel(threads: Ranks) -> None:
    assert threads(2)(meanwhile, True) == [True, True]
    assert threads(2)(meanwhile, False) == [False, False]
