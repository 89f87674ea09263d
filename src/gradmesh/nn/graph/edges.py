"""The edges that end at this rank's nodes, in local row indices."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import NoReturn, TypeGuard

import torch
from torch import Tensor

from gradmesh._torch import is_fake, modes_active
from gradmesh.errors import ArgumentError
from gradmesh.transport import compiling
from gradmesh.verbs.call import kind_of

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
"""Index dtypes."""

Fail = Callable[[str, str, str, str], NoReturn]
"""Raises an error from its problem, expected, got and remedy."""


@dataclass(frozen=True, eq=False)
class Edges:
    """Edges in local row indices.

    Attributes:
        edge_index: sources and targets, shape (2, edges); local rows come first, then remote rows.
        edges: the indices of these edges in the given list, in rising order.
        interior: indices into `edge_index` of the edges with both ends in local rows.
        boundary: indices into `edge_index` of the other edges.
    """

    edge_index: Tensor
    edges: Tensor
    interior: Tensor
    boundary: Tensor


def local_edges(pairs: Tensor, numbers: Tensor, own: tuple[int, int]) -> Edges:
    """Edges from local row indices; `own` has the numbers of local rows of the source and target types."""
    inside = (pairs[0] < own[0]) & (pairs[1] < own[1])
    return Edges(pairs, numbers, inside.nonzero().squeeze(1), (~inside).nonzero().squeeze(1))


def checked_edges(edges: object, nodes: int | tuple[int, int], fail: Fail) -> Tensor:
    """The edges as int64; `nodes` is the number of nodes, or of source nodes and of target nodes."""
    if not is_table(edges, 2, INDEX) or edges.shape[0] != 2:
        fail(
            "edges is not an integer tensor of shape (2, edges)",
            "int64 node indices, sources in row 0 and targets in row 1",
            shown(edges),
            "pass edges.T"
            if is_table(edges, 2, INDEX) and edges.shape[1] == 2
            else "torch.stack((source, target))",
        )
    ends = (nodes, nodes) if isinstance(nodes, int) else nodes
    for name, numbers, most in zip(("source", "target"), edges, ends, strict=True):
        if numbers.numel() and (int(numbers.min()) < 0 or int(numbers.max()) >= most):
            fail(
                f"an edge's {name} is out of range",
                f"0 <= {name} < {most}",
                f"{name}s from {int(numbers.min())} to {int(numbers.max())}",
                "use global node indices that start at 0",
            )
    return edges.long()


def picked_edges(edges: Tensor, count: int, refuse: Callable[..., NoReturn]) -> Tensor:
    """An index or a mask of a rank's edges, as an index; values are checked on a CPU only."""
    traced = compiling() or (isinstance(edges, Tensor) and is_fake(edges))
    valid = traced or is_table(edges, 1, INDEX)
    if not traced and valid and edges.is_cpu and edges.numel() and not modes_active():
        valid = int(edges.min()) >= 0 and int(edges.max()) < count
    if not valid and not (is_table(edges, 1, (torch.bool,)) and edges.shape[0] == count):
        numbers = f" from {int(edges.min())} to {int(edges.max())}" if is_table(edges, 1, INDEX) else ""
        refuse(
            "edges is not an index or a mask of this rank's edges",
            f"a 1-d tensor of int64 with 0 <= edge < {count}, or a mask of shape [{count}]",
            shown(edges) + numbers,
            "pass e.g. edges=plan.interior or edges=plan.boundary; indices count columns of plan.edge_index",
            ArgumentError,
        )
    return edges.nonzero().squeeze(1) if edges.dtype is torch.bool else edges


def is_table(x: object, dims: int, dtypes: Container[torch.dtype]) -> TypeGuard[Tensor]:
    """True for a dense tensor of `dims` dimensions and one of the dtypes, with readable values."""
    dense = (
        isinstance(x, Tensor) and x.layout is torch.strided and not x.is_nested and not hasattr(x, "to_local")
    )
    return isinstance(x, Tensor) and dense and x.dim() == dims and x.dtype in dtypes and not is_fake(x)


def shown(x: object) -> str:
    """Describe an invalid tensor argument."""
    if not isinstance(x, Tensor) or x.layout is not torch.strided or x.is_nested:
        return kind_of(x)
    kind = "" if type(x) is Tensor else f"{type(x).__name__} of "
    return f"{kind}{x.dtype}{list(x.shape)}{', which has no values' if is_fake(x) else ''}"


def added(values: Tensor, index: Tensor, rows: int) -> Tensor:
    """Deterministic `zeros.index_add(0, index, values)`."""
    zeros = values.new_zeros((rows, *values.shape[1:]))
    if values.is_cpu:
        return zeros.index_add(0, index, values)
    # On a GPU index_add is not deterministic; index_put sorts first.
    return zeros.index_put((index,), values, accumulate=True)
