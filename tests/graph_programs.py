"""Small message-passing networks with random weights, in parts and on one process: what the graph tests compare."""

from __future__ import annotations

import copy
import io
import random
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import gradmesh as gm
from gradmesh.nn.graph import GraphPlan, by_count, by_graph, by_space

WIDTH = 4
ATTRIBUTES = 2
WITHOUT_GRAD = {"in inference mode": torch.inference_mode, "under no_grad": torch.no_grad}


@dataclass(frozen=True)
class Program:
    """What one program does.

    Attributes:
        seed: of the graph and of the weights.
        nodes: the number of nodes; 0 too.
        edges: the number of edges, drawn with repetition and loops.
        structures: how many graphs the batch has.
        layers: how many layers.
        hops: how many layers an exchange serves.
        partition: how the nodes are cut.
        given: how the graph is given.
        overlapped: whether interior edges are worked on while rows travel.
        ordered: whether it runs in `gm.ordered()`.
        readout: how the rows of all ranks come together in the end.
        idle: a rank that makes an exchange of whose result it uses nothing, while the others do; -1: there is none.
        made: how the plan was prepared: read from its state, copied, made in inference mode.
        masks: whether edges are passed as masks instead of an index.
    """

    seed: int
    nodes: int = 11
    edges: int = 40
    structures: int = 2
    layers: int = 2
    hops: int = 1
    partition: str = "count"
    given: str = "whole"
    overlapped: bool = False
    ordered: bool = False
    readout: str = "pool"
    idle: int = -1
    made: str = "once"
    masks: bool = False


def random_program(seed: int, ranks: int) -> Program:
    """A program drawn from a seed."""
    draw = random.Random(seed)
    idle = draw.choice([-1, -1, draw.randrange(ranks)])
    ordered = draw.random() < 0.5
    return Program(
        seed,
        nodes=draw.choice([0, 1, 2, 7, 12, 17]),
        edges=draw.choice([0, 1, 9, 40, 80]),
        structures=draw.choice([1, 3]),
        layers=draw.choice([1, 2, 3]),
        hops=draw.choice([1, 1, 2, 3]),
        partition=draw.choice(
            ["count", "graph", "bisection", "curve", "random", "one rank empty", "one rank has all"]
        ),
        given=draw.choice(["whole", "root", "parts", "parts and owner"]),
        # Outside of ordered(), ranks that leave out a result deadlock across two groups if one has async calls.
        overlapped=draw.random() < 0.4 and (ordered or idle < 0),
        ordered=ordered,
        readout=draw.choice(["pool", "pool", "gather to I", "gather to R"]),
        idle=idle,
        made=draw.choice(
            ["once", "once", "stored", "copied", "deeply copied", "rebuilt", "in inference mode"]
        ),
        masks=draw.random() < 0.3,
    )


@dataclass(frozen=True)
class Graph:
    """Nodes with positions, edges with attributes, and the weights of the network."""

    positions: Tensor
    edges: Tensor
    attributes: Tensor
    batch: Tensor
    weights: list[Tensor]


def graph_of(program: Program) -> Graph:
    draw = torch.Generator().manual_seed(program.seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=draw)

    nodes, edges = program.nodes, program.edges if program.nodes else 0
    shapes = [(3, WIDTH), *[(2 * WIDTH + ATTRIBUTES + 3, WIDTH)] * program.layers, (WIDTH, 1)]
    return Graph(
        normal(nodes, 3),
        torch.randint(0, max(nodes, 1), (2, edges), generator=draw),
        normal(edges, ATTRIBUTES),
        torch.randint(0, program.structures, (nodes,), generator=draw),
        [0.5 * normal(*shape) for shape in shapes],
    )


def owner_of(program: Program, graph: Graph, ranks: int) -> Tensor:
    nodes = program.nodes
    draw = torch.Generator().manual_seed(program.seed + 1)
    if program.partition == "count":
        return by_count(nodes, ranks)
    if program.partition == "graph":
        return by_graph(graph.batch, ranks)
    if program.partition in ("bisection", "curve"):
        cell = 2.0 * torch.eye(3) if program.seed % 2 else None
        return by_space(graph.positions, ranks, cell=cell, method=program.partition)  # type: ignore[arg-type]
    owner = torch.randint(0, ranks, (nodes,), generator=draw)
    if program.partition == "one rank empty":
        owner[owner == ranks // 2] = 0 if ranks // 2 else ranks - 1
    if program.partition == "one rank has all":
        owner[:] = ranks - 1
    return owner


def plan_of(program: Program, graph: Graph, owner: Tensor) -> GraphPlan:
    """The plan, after what becomes of it."""
    if program.made in WITHOUT_GRAD:
        with WITHOUT_GRAD[program.made]():
            return _plan_of(program, replace(graph, edges=graph.edges.clone()), owner.clone())
    if program.made == "rebuilt":
        before = _plan_of(program, replace(graph, edges=graph.edges[:, :0]), owner)
        return before.rebuilt(given_edges(program, graph, owner))
    plan = _plan_of(program, graph, owner)
    if program.made == "stored":
        file = io.BytesIO()
        torch.save(plan.state(), file)
        file.seek(0)
        return GraphPlan.of_state(torch.load(file, weights_only=True))
    return {"copied": copy.copy, "deeply copied": copy.deepcopy}.get(program.made, lambda plan: plan)(plan)


def given_edges(program: Program, graph: Graph, owner: Tensor) -> Tensor | None:
    """The edges that this rank is given."""
    if program.given == "whole":
        return graph.edges
    if program.given == "root":
        return graph.edges if gm.rank() == gm.world_size() - 1 else None
    return graph.edges[:, owner[graph.edges[1]] == gm.rank()]


def _plan_of(program: Program, graph: Graph, owner: Tensor) -> GraphPlan:
    rank, hops = gm.rank(), program.hops
    if program.given == "whole":
        return GraphPlan(graph.edges, owner, hops=hops)
    if program.given == "root":
        root = gm.world_size() - 1
        return (
            GraphPlan(graph.edges, owner, root=root, hops=hops)
            if rank == root
            else GraphPlan(root=root, hops=hops)
        )
    own = (owner == rank).nonzero().squeeze(1).flip(0)
    known = owner if program.given == "parts and owner" else None
    return GraphPlan(given_edges(program, graph, owner), known, own=own, hops=hops)


def numbers_of_edges(program: Program, plan: GraphPlan, graph: Graph) -> Tensor:
    """Which edges of the whole graph the plan's are."""
    if not program.given.startswith("parts"):
        return plan.edges
    ends = plan.owner[graph.edges[1]]
    if program.hops == 1:
        return (ends == gm.rank()).nonzero().squeeze(1)[plan.edges]
    return ends.argsort(stable=True)[plan.edges]  # rank 0's edges first


def message(
    weight: Tensor, x: Tensor, at: Tensor, source: Tensor, target: Tensor, attributes: Tensor
) -> Tensor:
    ends = x[source], x[target], attributes, at[source] - at[target]
    return torch.tanh(torch.cat(ends, dim=1) @ weight)


def dense_energy(graph: Graph, at: Tensor, weights: list[Tensor], structures: int) -> Tensor:
    """The energy of each structure on one process."""
    source, target = graph.edges
    x = torch.tanh(at @ weights[0])
    for weight in weights[1:-1]:
        sums = torch.zeros_like(x).index_add(
            0, target, message(weight, x, at, source, target, graph.attributes)
        )
        x = torch.sin(x + sums)
    return torch.zeros(structures, dtype=x.dtype).index_add(0, graph.batch, (x**2 @ weights[-1]).squeeze(1))


def dense_extra(program: Program, graph: Graph, at: Tensor, owner: Tensor, ranks: int) -> Tensor:
    """What the ranks but the idle one make of the rows of an exchange, on one process."""
    total = at.new_zeros(())
    for rank in sorted(set(range(ranks)) - {program.idle}):
        needed = owner == rank
        for _ in range(program.hops):
            needed = needed.clone()
            needed[graph.edges[0][needed[graph.edges[1]]]] = True
        total = total + (rank + 1) * (at[needed] ** 3).sum()
    return total


def energy(program: Program, plan: GraphPlan, graph: Graph, at: Tensor, weights: list[Tensor]) -> Tensor:
    """The same on the ranks' parts: the energy of each structure on every rank."""
    attributes = graph.attributes[numbers_of_edges(program, plan, graph)]
    own = len(plan.own)
    here = plan.exchange(plan.take(at))
    x = torch.tanh(here[:own] @ weights[0])
    source, target = plan.edge_index
    layers, inside, outside = weights[1:-1], plan.interior, plan.boundary
    if program.masks:
        inside = (plan.edge_index < own).all(0)
        outside = ~inside
    for layer, weight in enumerate(layers):
        if plan.hops > 1:
            if layer % plan.hops == 0:
                x = plan.exchange(x[:own])
            x = torch.sin(x + plan.scatter_add(message(weight, x, here, source, target, attributes)))
            continue
        if program.overlapped:
            pending = plan.exchange(x, async_op=True)
            ends = source[inside], target[inside]
            sums = plan.scatter_add(message(weight, x, here, *ends, attributes[inside]), inside)
            rows = pending.wait()
            ends = source[outside], target[outside]
            sums = sums + plan.scatter_add(message(weight, rows, here, *ends, attributes[outside]), outside)
        else:
            rows = plan.exchange(x)
            sums = plan.scatter_add(message(weight, rows, here, source, target, attributes))
        x = torch.sin(x + sums)
    terms = (x[:own] ** 2 @ weights[-1]).squeeze(1)
    extra = at.new_zeros(())
    if program.idle >= 0:
        rows = plan.exchange(plan.take(at))
        used = (gm.rank() + 1) * (rows**3).sum() if gm.rank() != program.idle else extra
        extra = gm.all_reduce(used, dst=gm.I)
    if program.readout == "pool":
        return plan.pool(terms, graph.batch[plan.own], program.structures) + extra
    whole = plan.gather(terms, dst=gm.I if program.readout == "gather to I" else gm.R)
    if program.readout == "gather to R":  # each rank sums the structures that are its own to sum
        mine = graph.batch % gm.world_size() == gm.rank()
        whole = torch.where(mine, whole, 0 * whole)
    sums = torch.zeros(program.structures, dtype=whole.dtype).index_add(0, graph.batch, whole)
    return (gm.all_reduce(sums, dst=gm.I) if program.readout == "gather to R" else sums) + extra


def training_loss(energies: Tensor, forces: Tensor) -> Tensor:
    weight = torch.linspace(0.5, 1.5, forces.numel(), dtype=forces.dtype).view_as(forces)
    return (energies**2).sum() + (weight * forces**2).sum()


def dense(program: Program, ranks: int) -> list[Tensor]:
    """Energies, forces, the gradient of the loss on both by weights and positions, on one process."""
    graph = graph_of(program)
    at = graph.positions.clone().requires_grad_()
    weights = [weight.clone().requires_grad_() for weight in graph.weights]
    energies = dense_energy(graph, at, weights, program.structures)
    if program.idle >= 0:
        energies = energies + dense_extra(program, graph, at, owner_of(program, graph, ranks), ranks)
    (slope,) = torch.autograd.grad(energies.sum(), at, create_graph=True)
    gradients = torch.autograd.grad(training_loss(energies, -slope), [at, *weights])
    return [energies, -slope, *gradients]


def in_parts(program: Program, again: Any = None) -> list[Tensor]:
    """The same on the calling rank."""
    graph = graph_of(program)
    plan = plan_of(program, graph, owner_of(program, graph, gm.world_size()))
    if again is not None:
        plan = again(plan)
    at = graph.positions.clone().requires_grad_()
    weights = [weight.clone().requires_grad_() for weight in graph.weights]

    def forward() -> tuple[Tensor, Tensor]:
        shared = list(gm.replicate(tuple(weights)))
        energies = energy(program, plan, graph, at, shared)
        grad = gm.grad if program.ordered else torch.autograd.grad
        (slope,) = grad(energies.sum(), at, create_graph=True)
        return energies, -slope

    if not program.ordered:
        energies, forces = forward()
        gradients = torch.autograd.grad(training_loss(energies, forces), [at, *weights])
    else:
        with gm.ordered():
            energies, forces = forward()
            gradients = gm.grad(training_loss(energies, forces), [at, *weights])
    return [energies.detach(), forces.detach(), *gradients]


NAMES = ("energies", "forces", "gradient by positions", *(f"gradient by weights {n}" for n in range(9)))


def held(seeds: list[int]) -> list[str]:
    """What of some random programs is wrong on this rank, or the library's own error."""
    said = []
    for seed in seeds:
        program = random_program(seed, gm.world_size())
        try:
            said.append("; ".join(differences(program)))
        except gm.GradmeshError as error:
            said.append(f"refused: {str(error).splitlines()[0]}")
    return said


def verdicts(seeds: list[int], by_rank: list[list[str]]) -> list[str]:
    """What is wrong with the programs: gradients, or an error where there should be none, or not on every rank."""
    wrong = []
    for seed, *said in zip(seeds, *by_rank, strict=True):
        program = random_program(seed, len(by_rank))
        refused = [one.startswith("refused") for one in said]
        may_be = program.idle >= 0 and not program.ordered
        if all(refused) and may_be:
            continue
        if any(said):
            wrong.append(f"{program}: {said}")
    return wrong


def differences(program: Program, bound: float = 1e-10, again: Any = None) -> list[str]:
    """What a rank has otherwise than one process; nothing, if it is right."""
    wrong = []
    for name, got, expected in zip(
        NAMES, in_parts(program, again), dense(program, gm.world_size()), strict=False
    ):
        scale = expected.detach().abs().max().item() if expected.numel() else 0.0
        worst = (
            (got - expected).detach().abs().max().item()
            if got.shape == expected.shape and got.numel()
            else 0.0
        )
        if got.shape != expected.shape or not worst <= bound * max(1.0, scale):
            wrong.append(f"{name}: {worst} of {scale}")
    return wrong
