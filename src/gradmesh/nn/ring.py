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
    """Send each rank's block around the ring; each transfer is started before the computation that it overlaps with.

    Args:
        ranks: the number of ranks.
        block: this rank's tensors; not sent if there is one rank.
        work: computes this rank's terms of the sums that belong to a block, from the number of hops and the block.
        combine: adds this rank's term (the second argument) to the sum of the ranks before it.
        send: sends a block.
        send_sums: sends the sums of a block.

    Returns:
        The sums that belong to this rank's block, over all ranks.
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
