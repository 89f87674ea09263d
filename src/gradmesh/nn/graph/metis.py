"""Nodes to ranks by METIS, which knows the edges alone: for graphs that lie in no space."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from gradmesh.extras import require
from gradmesh.nn.graph.edges import checked_edges
from gradmesh.nn.graph.partition import fail, number_of, ranks_of

__all__ = ["by_metis"]


def by_metis(edges: Tensor, nodes: int, ranks: int) -> Tensor:
    """Cut the graph where few edges cross, with METIS (Karypis and Kumar, 1998) in parts of about one size.

    It needs the extra `metis`. Two ranks with the same METIS get the same parts; where they may differ, let one of
    them cut, and broadcast what it found.

    Args:
        edges: sources and targets, shape (2, edges); the direction does not count, nor do edges that stand twice.
        nodes: the number of nodes.
        ranks: the number of ranks.

    Returns:
        The rank of each node, shape (nodes,).

    Raises:
        ArgumentError: edges that are no pairs of nodes, numbers that are none.
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
