"""A small network of distances, on one process and in parts: energy, forces, stress, and their slopes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

import gradmesh as gm
from gradmesh.nn.graph import GraphPlan

_LAYERS = 2


class Parts(Protocol):
    """What of a plan the network uses."""

    own: Tensor
    edges: Tensor
    edge_index: Tensor
    interior: Tensor
    boundary: Tensor

    @property
    def exchange(self) -> Any:
        """Own rows followed by the remote ones, `exchange(x, async_op=False)`."""

    def scatter_add(self, messages: Tensor, edges: Tensor | None = None) -> Tensor:
        """The sum of the messages at each target."""

    def pool(self, x: Tensor) -> Tensor:
        """The sum of all nodes' rows."""


@dataclass(frozen=True)
class Crystal:
    """Points in a periodic cell, and their edges."""

    points: Tensor  # where they are, shape (nodes, 3)
    cell: Tensor  # the vectors of the cell as rows
    edges: Tensor  # sources and targets
    shifts: Tensor  # for each edge the cells by which its source is moved, whole numbers, shape (edges, 3)


@dataclass(frozen=True)
class Figures:
    """What is compared."""

    energy: Tensor
    forces: Tensor  # minus its slope by the positions
    stress: Tensor  # its slope by a strain of positions and cell, over the volume
    # those of a loss on the forces and of one on the stress, by the positions, the strain and the weights:
    # second derivatives, by the names of both
    slopes: dict[str, Tensor]


def weights(width: int, seed: int = 1) -> list[Tensor]:
    """Those of the network."""
    draw = torch.Generator().manual_seed(seed)
    shapes = [(width, width + 1)] * _LAYERS + [(width, 1)]
    return [torch.randn(*shape, dtype=torch.float64, generator=draw) / shape[0] ** 0.5 for shape in shapes]


def _message(rows: Tensor, ends: tuple[Tensor, Tensor], at: Tensor, images: Tensor, weight: Tensor) -> Tensor:
    source, target = ends
    square = ((at[source] + images - at[target]) ** 2).sum(1, keepdim=True)
    return torch.tanh(rows[source] @ weight[:, :-1] - 0.1 * square * weight[:, -1]) * torch.exp(-0.5 * square)


def _deformed(x: Tensor, strain: Tensor | None) -> Tensor:
    return x if strain is None else x + x @ strain


def whole_energy(crystal: Crystal, at: Tensor, strain: Tensor | None, weights: list[Tensor]) -> Tensor:
    """On one process."""
    ends = (crystal.edges[0], crystal.edges[1])
    here, images = _deformed(at, strain), crystal.shifts @ _deformed(crystal.cell, strain)
    x = torch.ones(len(at), weights[0].shape[0], dtype=at.dtype)
    for weight in weights[:-1]:
        sums = torch.zeros_like(x).index_add(0, ends[1], _message(x, ends, here, images, weight))
        x = x + torch.sin(sums)
    return (x @ weights[-1]).tanh().sum()


def own_energy(
    plan: Parts,
    crystal: Crystal,
    at: Tensor,
    strain: Tensor | None,
    leaves: list[Tensor],
    *,
    overlap: bool = True,
) -> Tensor:
    """On this rank: the energy of all nodes, the same on every rank."""
    # Replicated once, so that every use of it on any rank counts in its gradient.
    shared: tuple[Tensor, ...] = gm.replicate((*leaves, *([] if strain is None else [strain])))
    weights, strained = shared[: len(leaves)], None if strain is None else shared[-1]
    here = _deformed(plan.exchange(at), strained)
    images = crystal.shifts[plan.edges] @ _deformed(crystal.cell, strained)
    x = torch.ones(len(plan.own), leaves[0].shape[0], dtype=at.dtype)

    def messages(rows: Tensor, which: Tensor | None, weight: Tensor) -> Tensor:
        source, target = plan.edge_index if which is None else plan.edge_index[:, which]
        moved = images if which is None else images[which]
        return plan.scatter_add(_message(rows, (source, target), here, moved, weight), which)

    for weight in weights[:-1]:
        if overlap:
            pending = plan.exchange(x, async_op=True)
            sums = messages(x, plan.interior, weight)
            sums = sums + messages(pending.wait(), plan.boundary, weight)
        else:
            sums = messages(plan.exchange(x), None, weight)
        x = x + torch.sin(sums)
    return plan.pool((x @ weights[-1]).tanh().sum(1)).sum()


def _figures(
    energy: Callable[[Tensor, Tensor, list[Tensor]], Tensor], crystal: Crystal, given: list[Tensor]
) -> Figures:
    at = crystal.points.clone().requires_grad_()
    strain = torch.zeros_like(crystal.cell).requires_grad_()
    leaves = [weight.clone().requires_grad_() for weight in given]
    total = energy(at, strain, leaves)
    slopes = torch.autograd.grad(total, [at, strain], create_graph=True)
    second, names = {}, ("position", "strain")
    for name, slope in zip(names, slopes, strict=True):
        target = torch.linspace(-1, 1, slope.numel(), dtype=slope.dtype).view_as(slope)
        by = torch.autograd.grad(((slope - target) ** 2).mean(), [at, strain, *leaves], retain_graph=True)
        by_weights = torch.cat([each.reshape(-1) for each in by[2:]])
        for other, found in zip((*names, "weight"), (*by[:2], by_weights), strict=True):
            second[f"{name}-{other}"] = found
    volume = torch.linalg.det(crystal.cell)
    return Figures(total.detach(), -slopes[0].detach(), slopes[1].detach() / volume, second)


def dense(crystal: Crystal, given: list[Tensor]) -> Figures:
    """On one process."""
    return _figures(lambda at, strain, leaves: whole_energy(crystal, at, strain, leaves), crystal, given)


def in_parts(plan: GraphPlan, crystal: Crystal, given: list[Tensor]) -> Figures:
    """On this rank, of positions, a strain and weights that every rank has."""

    def energy(at: Tensor, strain: Tensor, leaves: list[Tensor]) -> Tensor:
        return own_energy(plan, crystal, plan.take(at), strain, leaves)

    return _figures(energy, crystal, given)
