"""What a rank worked: all the time in which it did not wait, cut where a backward pass begins and ends."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from gradmesh.verify.simulator.trace import Work

__all__ = ["Span", "worked"]

Span = tuple[float, float]
"""Begin and end."""


def worked(rank: int, whole: Span, waits: Iterable[Span], passes: Sequence[Span]) -> list[Work]:
    """The time of a rank that is left when its waits are taken out.

    Args:
        rank: the rank.
        whole: from when to when it was watched.
        waits: when it waited.
        passes: its backward passes, of which none overlap.

    >>> [(w.phase, w.start, w.end) for w in worked(0, (0, 9), [(2, 3), (5, 6)], [(4, 8)])]
    [('forward', 0, 2), ('forward', 3, 4), ('backward', 4, 5), ('backward', 6, 8), ('forward', 8, 9)]
    """
    begin, end = whole
    edges = sorted({begin, end, *(edge for one in passes for edge in one if begin < edge < end)})
    found = []
    standing = sorted(waits)
    for left, right in itertools.pairwise(edges):
        phase = "backward" if any(first <= left and right <= last for first, last in passes) else "forward"
        at = left
        for stood, went in standing:
            if went > at and stood < right:
                if stood > at:
                    found.append(Work(rank, phase, at, stood))
                at = went
        if at < right:
            found.append(Work(rank, phase, at, right))
    return found
