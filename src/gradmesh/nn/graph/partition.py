"""Nodes to ranks: the owner of each node, as a tensor that is the same on every rank."""

from __future__ import annotations

import heapq
from typing import NoReturn

import torch
from torch import Tensor

from gradmesh.arguments import integer
from gradmesh.axis import balanced
from gradmesh.errors import ArgumentError, message
from gradmesh.nn.graph.edges import is_table, shown

__all__ = ["by_count", "by_graph", "fail", "index_of", "number_of", "ranks_of"]

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def by_count(nodes: int, ranks: int) -> Tensor:
    """Cut the nodes by their number into parts of one size; the first ranks get one more where that does not divide.

    Args:
        nodes: the number of nodes.
        ranks: the number of ranks.

    Returns:
        The rank of each node, shape (nodes,).

    Raises:
        ArgumentError: numbers that are none.

    Example:
        >>> by_count(5, 2)
        tensor([0, 0, 0, 1, 1])
    """
    sizes = torch.tensor(balanced(number_of(nodes, "nodes", "by_count"), ranks_of(ranks, "by_count")))
    return torch.arange(len(sizes)).repeat_interleave(sizes)


def by_graph(batch: Tensor, ranks: int) -> Tensor:
    """Give each graph of a batch whole to one rank, so that no row travels.

    The largest graph is given away first, each to the rank that has fewest nodes so far (Graham, Bounds on
    multiprocessing timing anomalies, 1969).

    Args:
        batch: the graph of each node, shape (nodes,), counted from 0.
        ranks: the number of ranks.

    Returns:
        The rank of each node, shape (nodes,).

    Raises:
        ArgumentError: `batch` is no 1-d tensor of numbers of 0 or more; a number of ranks that is none.

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


def number_of(value: object, name: str, who: str) -> int:
    """An int of 0 or more."""
    whole = integer(value)
    if whole is None or whole < 0:
        fail(
            who,
            f"{name} is no number",
            "an int of 0 or more",
            f"{name}={value!r}",
            f"pass the number of {name}",
        )
    return whole


def ranks_of(value: object, who: str) -> int:
    """A number of ranks."""
    whole = integer(value)
    if whole is None or whole < 1:
        fail(
            who,
            "ranks is no number of ranks",
            "an int of 1 or more",
            f"ranks={value!r}",
            "pass gm.world_size(axis)",
        )
    return whole


def index_of(values: object, name: str, who: str) -> Tensor:
    """A 1-d tensor of integers of 0 or more."""
    least = int(values.min()) if is_table(values, 1, _INTEGERS) and values.numel() else 0
    if not is_table(values, 1, _INTEGERS) or least < 0:
        fail(
            who,
            f"{name} is no index",
            "a 1-d tensor of integers of 0 or more",
            f"{name}={shown(values)}" + (f" from {least} on" if least < 0 else ""),
            f"give one number for each element of {name}",
        )
    return values.long()


def fail(who: str, problem: str, expected: str, got: str, remedy: str) -> NoReturn:
    """Raise the error of a function that no other rank waits for."""
    raise ArgumentError(message(problem, op=f"nn.graph.{who}", expected=expected, got=got, remedy=remedy))
