"""How a sequence is sharded over the ranks: in order, or balanced for a causal mask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from gradmesh.runtime.mesh import balanced

__all__ = ["Order", "positions_of", "sizes_of", "spans"]

Order = Literal["plain", "zigzag"]
"""plain: rank 0 has the beginning, the last rank the end. zigzag: the sequence is split into 2 W pieces, and rank r has
pieces r and 2 W - 1 - r, so that causal attention is equal work on every rank."""


def spans(order: Order, sizes: Sequence[int]) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Each rank's positions as half-open intervals, in rising order.

    Args:
        order: "plain" or "zigzag".
        sizes: each rank's number of positions; zigzag uses only their sum.

    >>> spans("plain", (3, 2))
    (((0, 3),), ((3, 5),))
    >>> spans("zigzag", (4, 4))
    (((0, 2), (6, 8)), ((2, 4), (4, 6)))
    """
    if order == "plain":
        return tuple((span,) for span in _in_a_row(sizes))
    ranks = len(sizes)
    cut = _in_a_row(balanced(sum(sizes), 2 * ranks))
    return tuple((cut[rank], cut[-1 - rank]) for rank in range(ranks))


def sizes_of(order: Order, length: int, ranks: int) -> tuple[int, ...]:
    """Each rank's number of positions of an evenly sharded sequence.

    >>> sizes_of("plain", 9, 4), sizes_of("zigzag", 9, 4)
    ((3, 2, 2, 2), (3, 2, 2, 2))
    """
    if order == "plain":
        return balanced(length, ranks)
    cut = balanced(length, 2 * ranks)
    return tuple(cut[rank] + cut[-1 - rank] for rank in range(ranks))


def positions_of(order: Order, sizes: Sequence[int]) -> list[int]:
    """The positions of the concatenation of all ranks' shards.

    >>> positions_of("zigzag", (2, 2))
    [0, 3, 1, 2]
    """
    return [position for rank in spans(order, sizes) for span in rank for position in range(*span)]


def _in_a_row(sizes: Sequence[int]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    start = 0
    for size in sizes:
        found.append((start, start + size))
        start += size
    return found
