"""Epochs: all ranks of a group publish data, then read that of the others.

A rank has two chunks of shared memory, which it uses alternately. It writes one, publishes, waits until all ranks have
published, and reads their chunks. Before it writes a chunk again it has waited for a later epoch, which no rank
publishes before having read the earlier one, so that a second barrier is not needed.

In the first epoch of a call each rank also publishes the call's hash, and all compare. So mismatched calls raise on
every rank before a result is written.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from os import sched_yield

import torch

from gradmesh.backends.call_check import FLAGS, CallCheck
from gradmesh.backends.shm import futex
from gradmesh.backends.shm.buffers import Slots
from gradmesh.backends.shm.segment import Segment

__all__ = ["Call", "Lockstep", "RefusedError", "Steps"]

Steps = Iterator[None]
"""A pending call: yields to wait until all ranks have published."""


_64_BITS = 0xFFFF_FFFF_FFFF_FFFF
_WORDS = 4096
"""Maximum bytes of a rank's description of a mismatched call."""


class Lockstep:
    """The epochs of a group on one rank."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self.rank, self.size = segment.rank, segment.size
        self.epoch = 0
        self.uses = 0
        self._published = segment.published
        self._word = segment.word(segment.rank)
        self._alone = segment.size == 1

    def publish(self) -> bool:
        """Publish what was written; returns whether all ranks have published."""
        self.epoch += 1
        if self._alone:
            return True
        futex.fence()
        self._published[self.rank] = self.epoch
        futex.wake(self._word)
        return self.arrived()

    def open(self, call_hash: int, looks: int) -> bool:
        """Publish the first epoch of a call and poll up to `looks` times; returns whether all ranks have published."""
        epoch = self.epoch = self.epoch + 1
        self.segment.hashes[epoch & 1][self.rank] = call_hash
        if self._alone:
            return True
        published = self._published
        futex.fence()
        published[self.rank] = epoch
        futex.wake(self._word)
        for _ in range(looks):
            if min(published.tolist()) >= epoch:
                futex.fence()
                return True
            sched_yield()
        return False

    def chunks(self, dtype: torch.dtype, count: int) -> Slots:
        """The current chunks, for `count` elements of each rank."""
        return self.segment.slots(dtype, count)[self.uses & 1]

    def counts(self) -> memoryview:
        """The counts of the last published epoch: one row of 2 * size per rank."""
        return self.segment.counts[self.epoch & 1]

    def publish_counts(self, epoch: int, counts: Sequence[int]) -> None:
        """Write this rank's row of counts for an epoch."""
        row = 2 * self.size * self.rank
        self.segment.counts[epoch & 1][row : row + len(counts)] = memoryview(array("Q", counts))

    def agree(self, call_hash: int, call_check: CallCheck | None) -> bool:
        """Whether all ranks published this hash; flags that differ are passed to the call check."""
        hashes = self.segment.hashes[self.epoch & 1].tolist()
        if hashes.count(call_hash) == self.size:
            return True
        if call_check is None or any((other ^ call_hash) & ~FLAGS for other in hashes):
            return False
        call_check.peer_flags = [other & FLAGS for other in hashes]
        return True

    def arrived(self) -> bool:
        """Whether all ranks have published this epoch."""
        if min(self._published.tolist()) < self.epoch:
            return False
        futex.fence()
        return True

    def late(self) -> list[int]:
        """The ranks that have not published this epoch."""
        return [rank for rank, epoch in enumerate(self._published.tolist()) if epoch < self.epoch]

    def late_word(self) -> tuple[int, int] | None:
        """The word of such a rank, and its value."""
        for rank, epoch in enumerate(self._published.tolist()):
            if epoch < self.epoch:
                return self.segment.word(rank), epoch
        return None


class Call:
    """One call of this rank.

    Args:
        lockstep: the epochs of the group.
        call_hash: the call's hash, which the ranks compare.
        call_check: provides the error if the hashes differ.
        opened: whether its first epoch is already written and published.
    """

    def __init__(
        self, lockstep: Lockstep, call_hash: int, call_check: CallCheck, *, opened: bool = False
    ) -> None:
        self.lockstep = lockstep
        self.call_hash = call_hash & _64_BITS
        self.call_check = call_check
        self.agreed = False
        self.opened = opened

    def slots(self, dtype: torch.dtype, count: int) -> Slots:
        """The chunks of the next epoch, for `count` elements of each rank; already written if the call is `opened`."""
        if not self.opened:
            self.lockstep.uses += 1
        return self.lockstep.chunks(dtype, count)

    def counts(self, counts: Sequence[int]) -> None:
        """Publish counts with the first epoch."""
        if not self.opened:
            self.lockstep.publish_counts(self.lockstep.epoch + 1, counts)

    def meet(self) -> Steps:
        """Publish an epoch, the first one with the call's hash; continue when all ranks have, if they agree."""
        lockstep = self.lockstep
        if self.agreed:
            if not lockstep.publish():
                yield
            return
        if self.opened:
            self.opened = False
            if not lockstep.arrived():
                yield
        else:
            lockstep.segment.hashes[(lockstep.epoch + 1) & 1][lockstep.rank] = self.call_hash
            if not lockstep.publish():
                yield
        self.agreed = True
        if not lockstep.agree(self.call_hash, self.call_check):
            yield from self.refuse()

    def refuse(self) -> Steps:
        """Exchange descriptions of the call, and raise the error with those of all ranks.

        Raises:
            RefusedError: always.
        """
        lockstep = self.lockstep
        # Different calls may have used different numbers of chunks before.
        lockstep.uses = lockstep.epoch
        lockstep.uses += 1
        chunks = [lockstep.segment.raw_slot(rank, lockstep.uses & 1) for rank in range(lockstep.size)]
        said = self.call_check.said().encode()[:_WORDS]
        chunks[lockstep.rank][:_WORDS] = said.ljust(_WORDS)
        if not lockstep.publish():
            yield
        words = [bytes(chunk[:_WORDS]).decode(errors="replace").rstrip() for chunk in chunks]
        raise RefusedError(self.call_check.refusal(words))


class RefusedError(Exception):
    """All ranks reject a mismatched call; the group remains usable. The argument is the error to raise."""
