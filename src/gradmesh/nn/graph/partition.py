"""Partitions without positions: the rank of each node, as a tensor that is the same on every rank."""

from __future__ import annotations

import heapq
import importlib
from typing import Any, NoReturn

import torch
from torch import Tensor

from gradmesh._util.environment import require
from gradmesh.errors import ArgumentError, message
from gradmesh.nn.graph.edges import checked_edges, is_table, shown
from gradmesh.runtime.mesh import balanced
from gradmesh.verbs.call import integer

__all__ = ["by_count", "by_graph", "by_metis", "fail", "index_of", "number_of", "ranks_of"]

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
    graphs = index_of(batch, "batch", "by_graph")
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
    pairs = checked_edges(
        edges, nodes, lambda problem, expected, got, remedy: fail("by_metis", problem, expected, got, remedy)
    ).cpu()
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
            f"the number of {name}, e.g. {name}=1000",
            f"{name}={value!r}",
            f"pass the number of {name} of the full graph",
        )
    return whole


def ranks_of(value: object, who: str) -> int:
    """An int >= 1."""
    whole = integer(value)
    if whole is None or whole < 1:
        fail(
            who,
            "ranks must be a positive int",
            "the number of ranks, e.g. ranks=4",
            f"ranks={value!r}",
            "pass ranks=gm.world_size(axis)",
        )
    return whole


def index_of(values: object, name: str, who: str) -> Tensor:
    """A 1-d tensor of integers >= 0."""
    least = int(values.min()) if is_table(values, 1, _INTEGERS) and values.numel() else 0
    if not is_table(values, 1, _INTEGERS) or least < 0:
        fail(
            who,
            f"{name} is not a 1-d tensor of integers >= 0",
            "the graph of each node, e.g. torch.tensor([0, 0, 1])",
            f"{name}={shown(values)}" + (f" with minimum {least}" if least < 0 else ""),
            "number the graphs from 0",
        )
    return values.long()


def fail(who: str, problem: str, expected: str, got: str, remedy: str) -> NoReturn:
    """Raise ArgumentError for a function that does not communicate."""
    raise ArgumentError(message(problem, op=f"nn.graph.{who}", expected=expected, got=got, remedy=remedy))
