"""The ring of ranks: blocks travel around it, and the sums over the ranks that belong to a block follow it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

Send = Callable[[int, Sequence[Tensor]], list[Callable[[], Tensor]]]
"""Starts to send tensors to the next rank, after a number of hops; returns functions that wait for those received."""


def travel(
    ranks: int,
    block: Sequence[Tensor],
    work: Callable[[int, Sequence[Tensor]], Iterable[Tensor]],
    combine: Callable[[Tensor, Tensor], Tensor],
    send: Send,
    send_sums: Send,
) -> list[Tensor]:
    """Send each rank's block around the ring, and return the sums over all ranks that belong to this rank's block.

    `work` computes this rank's terms of the sums of a block, from the number of hops and the block; `combine` adds
    them, its second argument, to the sums of the ranks before it. Each transfer starts before the work that overlaps.
    """
    coming: list[Callable[[], Tensor]] = []
    for hop in range(ranks):
        following = send(hop, block) if hop < ranks - 1 else []
        sums = list(work(hop, block))
        if coming:
            sums = [combine(wait(), term) for wait, term in zip(coming, sums, strict=True)]
        if ranks == 1:
            return sums
        coming = send_sums(hop, sums)
        del sums  # free the memory before the next block arrives
        block = [wait() for wait in following]
    return [wait() for wait in coming]
