"""A sum over the neighbours in a graph in parts, and over those in the whole."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gradmesh.nn.graph import GraphPlan
from tools.layers.case import Case


def _ring(nodes: int) -> Tensor:
    """Edges between the next and to oneself, in both directions."""
    here = torch.arange(nodes)
    return torch.stack((here.repeat(3), torch.cat(((here + 1) % nodes, here, (here - 1) % nodes))))


def _dense(x: Tensor) -> Tensor:
    source, target = _ring(len(x))
    return torch.zeros_like(x).index_add(0, target, (x[source] * x[target]).tanh())


def _parts(_: list[torch.Size], sizes: tuple[int, ...]) -> Callable[..., Tensor]:
    owner = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    plan = GraphPlan(_ring(sum(sizes)), owner)

    def layer(x: Tensor) -> Tensor:
        rows = plan.exchange(x)
        source, target = plan.edge_index
        return plan.scatter_add((rows[source] * rows[target]).tanh())

    return layer


CASES = [
    Case(
        "GraphPlan.exchange, scatter_add",
        "V -> V",
        lambda n, s: [(n, 4 * s)],
        (0,),
        _dense,
        _parts,
        0,
        large=(16384, 16),
    ),
]
