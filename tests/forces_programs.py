"""Random structures, batches and partitions, and what the potential says of them on ranks and on one process."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from ase import Atoms
from gradmesh_demos.forces import parallel, single
from gradmesh_demos.forces.layers import CUTOFF, copied
from gradmesh_demos.forces.structures import ELEMENTS, Batch, Figures, batch_of
from gradmesh_demos.forces.training import loss_of
from torch import Tensor

import gradmesh as gm
from gradmesh.nn.graph import GraphPlan, by_count, by_graph, by_space

PARTITIONS = ("count", "graph", "space", "random", "one rank empty", "one rank has all")


@dataclass(frozen=True)
class Program:
    """What one program does.

    Attributes:
        seed: of the structures.
        structures: how many there are.
        partition: how the atoms are cut.
        loss: "whole": of the figures, the same on every rank; "own": each rank's own, of its atoms.
        idle: a rank whose loss leaves the forces out; -1: there is none.
        rebuilt: whether the plan is first made of other edges.
    """

    seed: int
    structures: int
    partition: str
    loss: str = "whole"
    idle: int = -1
    rebuilt: bool = False


def random_program(seed: int, ranks: int) -> Program:
    draw = random.Random(seed)
    loss = draw.choice(["whole", "whole", "own"])
    idle = draw.choice([-1, -1, draw.randrange(ranks)]) if loss == "own" else -1
    return Program(
        seed, draw.choice([1, 2, 4]), draw.choice(PARTITIONS), loss, idle, rebuilt=draw.random() < 0.3
    )


def structure_of(draw: random.Random) -> Atoms:
    """A single atom, a cluster, a chain, or a cell so small that atoms are neighbours of themselves."""
    kind = draw.choice(["atom", "cluster", "cluster", "tiny cell", "tiny cell", "chain", "apart"])
    if kind == "atom":
        return Atoms([draw.choice(ELEMENTS)], [[0.0, 0.0, 0.0]])
    if kind == "apart":
        return Atoms([draw.choice(ELEMENTS)] * 2, [[0.0, 0.0, 0.0], [0.0, 0.0, 9.0]])
    number = draw.randint(2, 7) if kind != "tiny cell" else draw.randint(1, 2)
    places = np.array([[2.3 * n, 0, 0] for n in range(number)]) + [
        [draw.gauss(0, 0.3) for _ in range(3)] for _ in range(number)
    ]
    if kind == "cluster":
        cube = [[x, y, z] for x in (0, 1) for y in (0, 1) for z in (0, 1)]
        places = 2.3 * np.array(draw.sample(cube, number)) + places - np.round(places)
    numbers = [draw.choice(ELEMENTS) for _ in range(number)]
    cell: object = None
    pbc: object = False
    if kind == "tiny cell":
        cell = np.diag([2.3 * number, 2.4, 2.7]) + np.array(
            [[draw.uniform(-0.3, 0.3) for _ in range(3)] for _ in range(3)]
        )
        pbc = [True, True, draw.random() < 0.5]
    if kind == "chain":
        cell, pbc = [[2.3 * number, 0, 0], [0, 0, 0], [0, 0, 0]], [True, False, False]
    return Atoms(numbers, places, cell=cell, pbc=pbc)


@cache
def sample_of(program: Program) -> tuple[Batch, Figures]:
    """The batch, and figures drawn at random that it is trained towards."""
    draw = random.Random(program.seed)
    batch, _ = batch_of([structure_of(draw) for _ in range(program.structures)], CUTOFF)
    made = torch.Generator().manual_seed(program.seed)
    shapes = (batch.structures,), (len(batch.kinds), 3), (batch.structures, 3, 3)
    return batch, Figures(*(torch.randn(*shape, dtype=torch.float64, generator=made) for shape in shapes))


def owner_of(program: Program, ranks: int) -> Tensor:
    batch, _ = sample_of(program)
    atoms = len(batch.kinds)
    if program.partition == "count":
        return by_count(atoms, ranks)
    if program.partition == "graph":
        return by_graph(batch.structure, ranks)
    if program.partition == "space":
        return by_space(batch.positions, ranks)
    if program.partition == "one rank has all":
        return torch.full((atoms,), ranks - 1)
    owner = torch.randint(0, ranks, (atoms,), generator=torch.Generator().manual_seed(program.seed))
    return torch.where(owner == 0, ranks - 1, owner) if program.partition == "one rank empty" else owner


@cache
def models() -> tuple[single.Potential, parallel.Potential]:
    """The same weights for one process and for ranks, such that elements alone have energies too."""
    dense, ranks = single.Potential(2, seed=3), parallel.Potential(2, seed=3)
    for model in (dense, ranks):
        model.alone.copy_(torch.linspace(-1, 1, len(model.alone)))
    return dense, ranks


Loss = Callable[[Figures, Figures, Batch], Tensor]


def _gradients(found: Figures, loss: Tensor, positions: Tensor, model: torch.nn.Module) -> dict[str, Tensor]:
    by_positions, *weights = torch.autograd.grad(loss, [positions, *model.parameters()])
    return {
        "energy": found.energy.detach(),
        "forces": found.forces.detach(),
        "stress": found.stress.detach(),
        "second derivative by positions": by_positions,
        "second derivative by weights": torch.cat([each.reshape(-1) for each in weights]),
    }


def dense(program: Program, ranks: int) -> dict[str, Tensor]:
    """On one process."""
    batch, right = sample_of(program)
    model = copied(models()[0])
    positions = batch.positions.clone().requires_grad_()
    found = single.figures(model, batch.at(positions), second=True)
    loss = loss_of(found, right, batch)
    if program.loss == "own":
        weight = 1.0 + owner_of(program, ranks)
        weight[weight == 1 + program.idle] = 0
        loss = (found.energy**2).sum() * sum(range(1, ranks + 1)) + (weight[:, None] * found.forces**2).sum()
    return _gradients(found, loss, positions, model)


def on_rank(program: Program) -> dict[str, Tensor]:
    """The same on the calling rank."""
    batch, right = sample_of(program)
    model = copied(models()[1])
    owner = owner_of(program, gm.world_size())
    plan = GraphPlan(batch.edges[:, :: 2 if program.rebuilt else 1], owner)
    if program.rebuilt:
        plan = plan.rebuilt(batch.edges)
    positions = batch.positions.clone().requires_grad_()
    found = parallel.figures(model, plan, batch.at(positions), second=True)
    loss = loss_of(found, right, batch)
    if program.loss == "own":
        loss = (1 + gm.rank()) * (gm.replicate(found.energy) ** 2).sum()
        own = plan.take(found.forces)
        if gm.rank() != program.idle:
            loss = loss + (1 + gm.rank()) * (own**2).sum()
    return _gradients(found, loss, positions, model)


def differences(program: Program, bound: float = 1e-10) -> str:
    """What a rank has otherwise than one process; nothing, if it is right."""
    got, right = on_rank(program), dense(program, gm.world_size())
    wrong = []
    for name, expected in right.items():
        scale = max(1.0, float(expected.abs().max()))
        worst = float((got[name] - expected).abs().max()) if got[name].shape == expected.shape else torch.nan
        if not worst <= bound * scale:
            wrong.append(f"{name}: {worst} of {scale}")
    return "; ".join(wrong)


def held(seeds: list[int]) -> list[str]:
    """What of some random programs is wrong on this rank, or the library's own error."""
    said = []
    for seed in seeds:
        try:
            said.append(differences(random_program(seed, gm.world_size())))
        except gm.GradmeshError as error:
            said.append(f"refused: {str(error).splitlines()[0]}")
    return said


def verdicts(seeds: list[int], by_rank: list[list[str]]) -> list[str]:
    """The programs that are wrong, or refused where they should not be, or not on every rank."""
    wrong = []
    for seed, *said in zip(seeds, *by_rank, strict=True):
        program = random_program(seed, len(by_rank))
        if program.idle >= 0 and all(one.startswith("refused") for one in said):
            continue
        if any(said):
            wrong.append(f"{program}: {said}")
    return wrong
