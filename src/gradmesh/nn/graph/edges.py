"""The edges that end at this rank's nodes, in the numbers of the rows that it has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

__all__ = ["Edges", "Fail", "added", "checked_edges", "local_edges"]

Fail = Callable[[str, str, str, str], NoReturn]
"""Raises an error: the problem, what was expected, what was got, and the remedy."""


@dataclass(frozen=True, eq=False)
class Edges:
    """Edges in local numbers.

    Attributes:
        edge_index: sources and targets, shape (2, edges); both count this rank's own rows and then the remote ones.
        edges: which of the given edges these are, in the order in which they were given.
        interior: which of them have both ends among the own rows; counted in `edge_index`.
        boundary: the others.
    """

    edge_index: Tensor
    edges: Tensor
    interior: Tensor
    boundary: Tensor


def local_edges(pairs: Tensor, numbers: Tensor, own: tuple[int, int]) -> Edges:
    """Edges whose ends are in local numbers already.

    Args:
        pairs: sources and targets.
        numbers: which of the given edges they are.
        own: how many own rows there are of the nodes that they begin at, and of those that they end at.
    """
    inside = (pairs[0] < own[0]) & (pairs[1] < own[1])
    return Edges(pairs, numbers, inside.nonzero().squeeze(1), (~inside).nonzero().squeeze(1))


def checked_edges(edges: object, nodes: int | tuple[int, int], fail: Fail) -> Tensor:
    """Edges as int64.

    Args:
        edges: what was given for them.
        nodes: the number of nodes; or that of those that edges begin at, and of those that they end at.
        fail: raises the error for what is no edge.
    """
    plain = isinstance(edges, Tensor) and edges.dim() == 2 and edges.shape[0] == 2
    if not isinstance(edges, Tensor) or not plain or edges.dtype not in (torch.int64, torch.int32):
        got = f"{edges.dtype}{list(edges.shape)}" if isinstance(edges, Tensor) else type(edges).__name__
        fail(
            "the edges are no list of edges",
            "int64 numbers of nodes, shape (2, edges): sources and targets",
            got,
            "stack the sources and the targets: torch.stack((source, target))",
        )
    ends = (nodes, nodes) if isinstance(nodes, int) else nodes
    for name, numbers, most in zip(("source", "target"), edges, ends, strict=True):
        if numbers.numel() and (int(numbers.min()) < 0 or int(numbers.max()) >= most):
            fail(
                "an edge leaves the graph",
                f"0 <= {name} < {most}",
                f"{name}s from {int(numbers.min())} to {int(numbers.max())}",
                "count nodes over the whole graph, from 0",
            )
    return edges.long()


def added(values: Tensor, index: Tensor, rows: int) -> Tensor:
    """Rows of zeros to which `values` are added where `index` says, in an order that is the same every time."""
    zeros = values.new_zeros((rows, *values.shape[1:]))
    if values.is_cpu:
        return zeros.index_add(0, index, values)
    # On a GPU index_add adds in no fixed order, and this sorts first.
    return zeros.index_put((index,), values, accumulate=True)
