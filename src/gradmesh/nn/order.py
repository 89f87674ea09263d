"""How a sequence lies on the ranks: in order, or balanced for a causal mask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from gradmesh.axis import balanced

__all__ = ["Order", "pieces", "places", "sizes_of", "spans"]

Order = Literal["plain", "zigzag"]
"""plain: rank 0 has the beginning, the last rank the end. zigzag: the sequence is cut into 2 W pieces, and rank r has
piece r and piece 2 W - 1 - r, so that every rank's rows see equally many keys before them."""


def spans(order: Order, sizes: Sequence[int]) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Each rank's places of the sequence, from one up to another, in rising order.

    Args:
        order: how they lie.
        sizes: how many each rank has; with zigzag their sum counts.

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
    """How many places each rank has of a sequence that is cut evenly.

    >>> sizes_of("plain", 9, 4), sizes_of("zigzag", 9, 4)
    ((3, 2, 2, 2), (3, 2, 2, 2))
    """
    if order == "plain":
        return balanced(length, ranks)
    cut = balanced(length, 2 * ranks)
    return tuple(cut[rank] + cut[-1 - rank] for rank in range(ranks))


def pieces(order: Order, length: int, ranks: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Each rank's places of a sequence that is cut evenly."""
    return spans(order, sizes_of(order, length, ranks))


def places(order: Order, sizes: Sequence[int]) -> list[int]:
    """The places of a sequence as the ranks have them, one rank's after another's.

    >>> places("zigzag", (2, 2))
    [0, 3, 1, 2]
    """
    return [place for rank in spans(order, sizes) for span in rank for place in range(*span)]


def _in_a_row(sizes: Sequence[int]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    start = 0
    for size in sizes:
        found.append((start, start + size))
        start += size
    return found
