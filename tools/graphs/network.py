"""A small network of distances, on one process and in parts: energy, forces, and the slope of a loss on both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import gradmesh as gm
from gradmesh.nn.graph import GraphPlan

__all__ = ["Figures", "dense", "in_parts", "weights"]

_LAYERS = 2


@dataclass(frozen=True)
class Figures:
    """What is compared.

    Attributes:
        energy: the energy.
        forces: minus its slope by the positions.
        slopes: those of a loss on the energy and the forces, by the positions and by each weight: second derivatives.
    """

    energy: Tensor
    forces: Tensor
    slopes: list[Tensor]


def weights(width: int, seed: int = 1) -> list[Tensor]:
    """Those of the network."""
    draw = torch.Generator().manual_seed(seed)
    shapes = [(width, width + 1)] * _LAYERS + [(width, 1)]
    return [torch.randn(*shape, dtype=torch.float64, generator=draw) / shape[0] ** 0.5 for shape in shapes]


def _message(rows: Tensor, ends: tuple[Tensor, Tensor], at: Tensor, images: Tensor, weight: Tensor) -> Tensor:
    source, target = ends
    square = ((at[source] + images - at[target]) ** 2).sum(1, keepdim=True)
    return torch.tanh(rows[source] @ weight[:, :-1] - 0.1 * square * weight[:, -1]) * torch.exp(-0.5 * square)


def _figures(
    energy: Callable[[Tensor, list[Tensor]], Tensor], points: Tensor, given: list[Tensor]
) -> Figures:
    at = points.clone().requires_grad_()
    leaves = [weight.clone().requires_grad_() for weight in given]
    total = energy(at, leaves)
    (slope,) = torch.autograd.grad(total, at, create_graph=True)
    target = torch.linspace(-1, 1, slope.numel(), dtype=slope.dtype).view_as(slope)
    loss = (total / len(points)) ** 2 + ((slope - target) ** 2).mean()
    slopes = torch.autograd.grad(loss, [at, *leaves])
    return Figures(total.detach(), -slope.detach(), list(slopes))


def dense(points: Tensor, edges: Tensor, images: Tensor, given: list[Tensor]) -> Figures:
    """On one process."""

    def energy(at: Tensor, weights: list[Tensor]) -> Tensor:
        x = torch.ones(len(at), given[0].shape[0], dtype=at.dtype)
        for weight in weights[:-1]:
            sums = torch.zeros_like(x).index_add(
                0, edges[1], _message(x, (edges[0], edges[1]), at, images, weight)
            )
            x = x + torch.sin(sums)
        return (x @ weights[-1]).tanh().sum()

    return _figures(energy, points, given)


def in_parts(plan: GraphPlan, points: Tensor, images: Tensor, given: list[Tensor]) -> Figures:
    """On this rank; interior edges are worked on while rows travel."""
    images = images[plan.edges]
    halves = [
        (half, (plan.edge_index[0, half], plan.edge_index[1, half]), images[half])
        for half in (plan.interior, plan.boundary)
    ]

    def energy(at: Tensor, leaves: list[Tensor]) -> Tensor:
        here = plan.exchange(plan.take(at))
        weights: tuple[Tensor, ...] = gm.replicate(tuple(leaves))
        x = torch.ones(len(plan.own), given[0].shape[0], dtype=at.dtype)
        for weight in weights[:-1]:
            pending = plan.exchange(x, async_op=True)
            (inside, near, moved), (outside, far, moved_too) = halves
            sums = plan.scatter_add(_message(x, near, here, moved, weight), inside)
            sums = sums + plan.scatter_add(_message(pending.wait(), far, here, moved_too, weight), outside)
            x = x + torch.sin(sums)
        return plan.pool((x @ weights[-1]).tanh().sum(1)).sum()

    return _figures(energy, points, given)
