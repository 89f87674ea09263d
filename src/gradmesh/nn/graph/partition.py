"""Partitions: the rank of each node, as a tensor that is the same on every rank."""

from __future__ import annotations

import heapq
import importlib
import math
from functools import partial
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor

from gradmesh._util.environment import require
from gradmesh.errors import ArgumentError
from gradmesh.nn.graph.plan import checked_edges, is_table, shown
from gradmesh.ops.sizes import balanced
from gradmesh.verbs.call import integer

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def by_count(nodes: int, ranks: int) -> Tensor:
    """Partition nodes by index into equal parts; the first ranks get one node more if the division has a remainder.

    Args:
        nodes: the number of nodes.
        ranks: the number of ranks.

    Returns:
        The rank of each node, shape (nodes,).

    Raises:
        ArgumentError: `nodes` is not an int >= 0, or `ranks` is not an int >= 1.

    Example:
        >>> by_count(5, 2)
        tensor([0, 0, 0, 1, 1])
    """
    sizes = torch.tensor(balanced(number_of(nodes, "nodes", "by_count"), ranks_of(ranks, "by_count")))
    return torch.arange(len(sizes)).repeat_interleave(sizes)


def by_graph(batch: Tensor, ranks: int) -> Tensor:
    """Assign each graph of a batch to one rank, so that an exchange sends nothing.

    Graphs are assigned in order of falling size, each to the rank with the fewest nodes so far (Graham, Bounds on
    multiprocessing timing anomalies, 1969).

    Args:
        batch: the index of each node's graph, shape (nodes,).
        ranks: the number of ranks.

    Returns:
        The rank of each node, shape (nodes,).

    Raises:
        ArgumentError: `batch` is not a 1-d tensor of integers >= 0, or `ranks` is not an int >= 1.

    Example:
        >>> by_graph(torch.tensor([0, 0, 1, 1, 1, 2]), 2)
        tensor([1, 1, 0, 0, 0, 1])
    """
    ranks = ranks_of(ranks, "by_graph")
    least = int(batch.min()) if is_table(batch, 1, _INTEGERS) and batch.numel() else 0
    if not is_table(batch, 1, _INTEGERS) or least < 0:
        fail(
            "by_graph",
            "batch is not a 1-d tensor of integers >= 0",
            expected="the graph of each node, e.g. torch.tensor([0, 0, 1])",
            got=f"batch={shown(batch)}" + (f" with minimum {least}" if least < 0 else ""),
            remedy="number the graphs from 0",
        )
    graphs = batch.long()
    sizes = torch.bincount(graphs).tolist()
    loads = [(0, rank) for rank in range(ranks)]
    owner = [0] * len(sizes)
    for graph in sorted(range(len(sizes)), key=lambda graph: (-sizes[graph], graph)):
        load, rank = heapq.heappop(loads)
        owner[graph] = rank
        heapq.heappush(loads, (load + sizes[graph], rank))
    return torch.tensor(owner, dtype=torch.int64, device=graphs.device)[graphs]


def by_metis(edges: Tensor, nodes: int, ranks: int) -> Tensor:
    """Partition a graph into parts of about equal size with few edges between them, by METIS.

    It needs the extra `metis`. Ranks with the same version of METIS get the same partition; if versions may differ,
    compute it on one rank and broadcast it. Source: Karypis and Kumar, 1998.

    Args:
        edges: sources and targets, shape (2, edges); directions and duplicates are ignored.
        nodes: the number of nodes.
        ranks: the number of ranks.

    Returns:
        The rank of each node, shape (nodes,).

    Raises:
        ArgumentError: invalid edges or numbers.
        MissingExtraError: `pymetis` is not installed.

    Example:
        `by_metis(edges, nodes=1000, ranks=gm.world_size())`
    """
    nodes, ranks = number_of(nodes, "nodes", "by_metis"), ranks_of(ranks, "by_metis")
    pairs = checked_edges(edges, nodes, partial(fail, "by_metis")).cpu()
    require("metis", "nn.graph.by_metis")
    pymetis: Any = importlib.import_module("pymetis")
    if ranks == 1 or not nodes:
        return torch.zeros(nodes, dtype=torch.int64, device=edges.device)
    both = torch.cat((pairs, pairs.flip(0)), dim=1)
    key = (both[0] * nodes + both[1])[both[0] != both[1]].unique()
    counts = torch.bincount(key // nodes, minlength=nodes).tolist()
    _, parts = pymetis.part_graph(ranks, [each.tolist() for each in (key % nodes).split(counts)])
    return torch.tensor(parts, dtype=torch.int64, device=edges.device)


def number_of(value: object, name: str, who: str) -> int:
    """An int >= 0."""
    whole = integer(value)
    if whole is None or whole < 0:
        fail(
            who,
            f"{name} must be an int >= 0",
            expected=f"the number of {name}, e.g. {name}=1000",
            got=f"{name}={value!r}",
            remedy=f"pass the number of {name} of the full graph",
        )
    return whole


def ranks_of(value: object, who: str) -> int:
    """An int >= 1."""
    whole = integer(value)
    if whole is None or whole < 1:
        fail(
            who,
            "ranks must be a positive int",
            expected="the number of ranks, e.g. ranks=4",
            got=f"ranks={value!r}",
            remedy="pass ranks=gm.world_size(axis)",
        )
    return whole


def fail(who: str, problem: str, *, expected: str, got: str, remedy: str) -> NoReturn:
    """Raise ArgumentError for a function that does not communicate."""
    raise ArgumentError.of(problem, op=f"nn.graph.{who}", expected=expected, got=got, remedy=remedy)


_REAL = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32)

_BITS = 16
"""The Hilbert curve has 2**_BITS cells along each dimension."""


def by_space(
    positions: Tensor,
    ranks: int,
    *,
    cell: Tensor | None = None,
    method: Literal["bisection", "curve"] = "bisection",
) -> Tensor:
    """Partition nodes by region; the sizes of the parts differ by at most one node.

    "bisection" (recursive coordinate bisection) splits the ranks in half and the nodes in the same proportion along
    their longest extent, recursively. "curve" splits a Hilbert curve through all nodes: regions are less compact, but a
    node that moves a little changes its owner less often.

    Args:
        positions: shape (nodes, dims); no gradient flows.
        ranks: the number of ranks.
        cell: the vectors of a periodic cell as rows, shape (dims, dims); positions are wrapped into it. None: not
            periodic.
        method: "bisection" or "curve".

    Returns:
        The rank of each node, shape (nodes,), on the device of the positions.

    Raises:
        ArgumentError: `positions` is not a matrix of finite numbers, `cell` has a wrong shape or no volume, unknown
            `method`, or `ranks` is not an int >= 1.

    Example:
        >>> corners = torch.tensor([[0.0, 0.0], [9.0, 0.0], [0.0, 1.0], [9.0, 1.0]])
        >>> by_space(corners, 2)
        tensor([0, 1, 0, 1])
    """
    ranks = ranks_of(ranks, "by_space")
    if method not in ("bisection", "curve"):
        fail(
            "by_space",
            "unknown method",
            expected='method="bisection" or method="curve"',
            got=f"method={method!r}",
            remedy="omit it for bisection",
        )
    wrapped = _wrapped(positions, cell)
    order = _bisected(wrapped, ranks) if method == "bisection" else _along_curve(wrapped)
    sizes = torch.tensor(balanced(len(order), ranks))
    owner = torch.empty_like(order)
    owner[order] = torch.arange(ranks).repeat_interleave(sizes)
    return owner.to(positions.device)


def _wrapped(positions: Tensor, cell: Tensor | None) -> Tensor:
    """Checked positions in float64; with a cell, wrapped coordinates along its vectors, in units of length."""
    if not is_table(positions, 2, _REAL) or positions.shape[1] == 0:
        fail(
            "by_space",
            "positions is not a real tensor of shape (nodes, dims)",
            expected="one row of coordinates for each node, e.g. shape (1000, 3)",
            got=shown(positions),
            remedy="pass a dense float tensor with 2 dimensions",
        )
    places = positions.detach().to("cpu", torch.float64)
    if not torch.isfinite(places).all():
        fail(
            "by_space",
            "positions are not finite",
            expected="finite numbers",
            got=f"{int((~torch.isfinite(places)).any(1).sum())} nodes with NaN or infinity, the first at index "
            f"{int((~torch.isfinite(places)).any(1).nonzero()[0])}",
            remedy="check the step that computed the positions",
        )
    if cell is not None:
        dims = places.shape[1]
        plain = is_table(cell, 2, _REAL) and tuple(cell.shape) == (dims, dims)
        vectors = cell.detach().to("cpu", torch.float64) if plain else torch.full((dims, dims), math.nan)
        lengths = (vectors**2).sum(1).sqrt()
        # Normalized vectors make the test independent of the unit of length. NaN fails the comparison too.
        # Rounding leaves dependent ones a volume of up to 16 eps.
        volume = abs(float(torch.linalg.det(vectors / lengths[:, None])))
        eps = torch.finfo(cell.dtype if plain and cell.is_floating_point() else torch.float64).eps
        if not volume > 16 * eps:
            fail(
                "by_space",
                "cell is not a valid periodic cell of these positions",
                expected=f"{dims} independent vectors of finite numbers as rows, shape ({dims}, {dims})",
                got=f"{cell.tolist() if plain else shown(cell)}",
                remedy=f"pass e.g. cell=10.0 * torch.eye({dims}); use a long vector along a non-periodic dimension",
            )
        inside: Tensor = torch.linalg.solve(vectors.T, places.T).T
        places = (inside - inside.floor()) * lengths
    if len(places) and not torch.isfinite(places.amax(0) - places.amin(0)).all():
        fail(
            "by_space",
            "the extent of the positions overflows float64",
            expected="a finite extent",
            got=f"coordinates from {float(positions.min())} to {float(positions.max())}",
            remedy="check the step that computed the positions",
        )
    return places


def _bisected(places: Tensor, ranks: int) -> Tensor:
    """The nodes in an order whose consecutive parts belong to rank 0, 1, ..."""
    sizes = balanced(len(places), ranks)

    def ordered(nodes: Tensor, first: int, last: int) -> Tensor:
        if last - first == 1 or not len(nodes):
            return nodes.sort().values
        middle = (first + last) // 2
        part = places[nodes]
        longest = int((part.amax(0) - part.amin(0)).argmax())
        nodes = nodes[part[:, longest].argsort(stable=True)]
        left = sum(sizes[first:middle])
        # Sort by index again, which breaks ties.
        halves = nodes[:left].sort().values, nodes[left:].sort().values
        return torch.cat((ordered(halves[0], first, middle), ordered(halves[1], middle, last)))

    return ordered(torch.arange(len(places)), 0, ranks)


def _along_curve(places: Tensor) -> Tensor:
    """The nodes in the order of a Hilbert curve."""
    if not len(places):
        return torch.arange(0)
    lowest = places.amin(0)
    extent = float((places.amax(0) - lowest).max())
    bits = min(_BITS, 62 // places.shape[1])
    if bits < 1:
        fail(
            "by_space",
            'too many dimensions for method="curve"',
            expected="at most 62",
            got=f"{places.shape[1]}",
            remedy='use method="bisection"',
        )
    steps = ((places - lowest) * (((1 << bits) - 1) / extent if extent else 0.0)).long()
    return _hilbert(list(steps.unbind(1)), bits).argsort(stable=True)


def _hilbert(axes: list[Tensor], bits: int) -> Tensor:
    """Each node's position along the curve (Skilling, Programming the Hilbert curve, 2004)."""
    zero = torch.zeros_like(axes[0])
    for level in range(bits - 1, 0, -1):
        bit = 1 << level
        for dim in range(len(axes)):
            inverted = (axes[dim] & bit) != 0
            swapped = torch.where(inverted, zero, (axes[0] ^ axes[dim]) & (bit - 1))
            axes[0] = torch.where(inverted, axes[0] ^ (bit - 1), axes[0] ^ swapped)
            if dim:
                axes[dim] = axes[dim] ^ swapped
    for dim in range(1, len(axes)):
        axes[dim] = axes[dim] ^ axes[dim - 1]
    turned = zero
    for level in range(bits - 1, 0, -1):
        bit = 1 << level
        turned = torch.where((axes[-1] & bit) != 0, turned ^ (bit - 1), turned)
    number = zero
    for level in range(bits - 1, -1, -1):
        for each in axes:
            number = (number << 1) | (((each ^ turned) >> level) & 1)
    return number
