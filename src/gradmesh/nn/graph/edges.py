"""The edges that end at this rank's nodes, in the numbers of the rows that it has."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import NoReturn, TypeGuard

import torch
from torch import Tensor

from gradmesh._torch import is_fake, modes_active
from gradmesh.arguments.plain import kind_of
from gradmesh.errors import ArgumentError
from gradmesh.transport import compiling

__all__ = [
    "INDEX",
    "Edges",
    "Fail",
    "added",
    "checked_edges",
    "is_table",
    "local_edges",
    "picked_edges",
    "shown",
]

INDEX = (torch.int64, torch.int32)
"""The dtypes that torch picks rows by."""

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
    if not is_table(edges, 2, INDEX) or edges.shape[0] != 2:
        fail(
            "the edges are no list of edges",
            "int64 numbers of nodes, shape (2, edges): sources and targets",
            shown(edges),
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


def picked_edges(edges: Tensor, count: int, refuse: Callable[..., NoReturn]) -> Tensor:
    """Some of a rank's edges as an index into them.

    Args:
        edges: an index, whose values are looked at where that costs no wait for a device; or a mask.
        count: how many edges there are.
        refuse: raises the error for what is neither.
    """
    seen = compiling() or (isinstance(edges, Tensor) and is_fake(edges))
    right = seen or is_table(edges, 1, INDEX)
    if not seen and right and edges.is_cpu and edges.numel() and not modes_active():
        right = int(edges.min()) >= 0 and int(edges.max()) < count
    if not right and not (is_table(edges, 1, (torch.bool,)) and edges.shape[0] == count):
        numbers = f" from {int(edges.min())} to {int(edges.max())}" if is_table(edges, 1, INDEX) else ""
        refuse(
            "edges picks something else than edges of this rank",
            f"a 1-d tensor of int64 with 0 <= edge < {count}, or a mask of {count}",
            shown(edges) + numbers,
            "pass plan.interior, plan.boundary, or count in plan.edge_index",
            ArgumentError,
        )
    return edges.nonzero().squeeze(1) if edges.dtype is torch.bool else edges


def is_table(x: object, dims: int, dtypes: Container[torch.dtype]) -> TypeGuard[Tensor]:
    """Whether something is a plain tensor of so many dimensions and one of these dtypes, whose values can be seen."""
    dense = (
        isinstance(x, Tensor) and x.layout is torch.strided and not x.is_nested and not hasattr(x, "to_local")
    )
    return isinstance(x, Tensor) and dense and x.dim() == dims and x.dtype in dtypes and not is_fake(x)


def shown(x: object) -> str:
    """What something is that is no such tensor, in words."""
    if not isinstance(x, Tensor) or x.layout is not torch.strided or x.is_nested:
        return kind_of(x)
    kind = "" if type(x) is Tensor else f"{type(x).__name__} of "
    return f"{kind}{x.dtype}{list(x.shape)}{', which has no values' if is_fake(x) else ''}"


def added(values: Tensor, index: Tensor, rows: int) -> Tensor:
    """Rows of zeros to which `values` are added where `index` says, in an order that is the same every time."""
    zeros = values.new_zeros((rows, *values.shape[1:]))
    if values.is_cpu:
        return zeros.index_add(0, index, values)
    # On a GPU index_add adds in no fixed order, and this sorts first.
    return zeros.index_put((index,), values, accumulate=True)
