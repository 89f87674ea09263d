"""The ranks of a group go through phases together: each publishes, and reads the others' when all have.

A rank has two chunks of shared memory, which it uses in turn. It writes one, publishes, waits until all have published,
and reads what the others wrote. Before it writes a chunk again it has waited for a later phase, which nobody
publishes before having read the earlier one: no second barrier is needed.

With the first phase of a call each rank publishes what it calls, and all compare. So a call that the ranks make
differently is an error on every rank, before anything is written to a result.
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
"""A call that is under way: it yields when it has to wait until all ranks have published."""


_64_BITS = 0xFFFF_FFFF_FFFF_FFFF
_WORDS = 4096
"""Bytes of what a rank says about a call that is refused."""


class Lockstep:
    """The phases of a group, as one of its ranks sees them."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self.rank, self.size = segment.rank, segment.size
        self.phase = 0
        self.uses = 0
        self._published = segment.published
        self._word = segment.word(segment.rank)
        self._alone = segment.size == 1

    def publish(self) -> bool:
        """Let the others see what was written; whether all have published already."""
        self.phase += 1
        if self._alone:
            return True
        futex.fence()
        self._published[self.rank] = self.phase
        futex.wake(self._word)
        return self.arrived()

    def open(self, head: int, looks: int) -> bool:
        """Publish the first phase of a call; whether all have published it, after so many looks at most."""
        phase = self.phase = self.phase + 1
        self.segment.heads[phase & 1][self.rank] = head
        if self._alone:
            return True
        published = self._published
        futex.fence()
        published[self.rank] = phase
        futex.wake(self._word)
        for _ in range(looks):
            if min(published.tolist()) >= phase:
                futex.fence()
                return True
            sched_yield()
        return False

    def chunks(self, dtype: torch.dtype, count: int) -> Slots:
        """The chunks in use, for so many elements of each rank."""
        return self.segment.slots(dtype, count)[self.uses & 1]

    def amounts(self) -> memoryview:
        """What every rank says of sizes in the phase that was published last: a row of twice their number for each."""
        return self.segment.amounts[self.phase & 1]

    def say_amounts(self, phase: int, amounts: Sequence[int]) -> None:
        """Write this rank's row for a phase."""
        row = 2 * self.size * self.rank
        self.segment.amounts[phase & 1][row : row + len(amounts)] = memoryview(array("Q", amounts))

    def agree(self, head: int, call_check: CallCheck | None) -> bool:
        """Whether the call of every rank has this head; flags that differ are told to the claim."""
        heads = self.segment.heads[self.phase & 1].tolist()
        if heads.count(head) == self.size:
            return True
        if call_check is None or any((other ^ head) & ~FLAGS for other in heads):
            return False
        call_check.peer_flags = [other & FLAGS for other in heads]
        return True

    def arrived(self) -> bool:
        """Whether all have published this phase."""
        if min(self._published.tolist()) < self.phase:
            return False
        futex.fence()
        return True

    def late(self) -> list[int]:
        """The ranks that have not."""
        return [rank for rank, phase in enumerate(self._published.tolist()) if phase < self.phase]

    def late_word(self) -> tuple[int, int] | None:
        """The word of a rank that has not, and its value."""
        for rank, phase in enumerate(self._published.tolist()):
            if phase < self.phase:
                return self.segment.word(rank), phase
        return None


class Call:
    """One call of this rank: what it says it is, and whether the others make the same.

    Args:
        lockstep: the phases of the group.
        head: 64 bits of what is called, which the ranks compare.
        claim: what the error says if they differ.
        opened: its first phase has been published already, with everything that belongs to it.
    """

    def __init__(self, lockstep: Lockstep, head: int, call_check: CallCheck, *, opened: bool = False) -> None:
        self.lockstep = lockstep
        self.head = head & _64_BITS
        self.call_check = call_check
        self.agreed = False
        self.opened = opened

    def slots(self, dtype: torch.dtype, count: int) -> Slots:
        """The chunks of the next phase, for so many elements of each rank; written already if the call is `opened`."""
        if not self.opened:
            self.lockstep.uses += 1
        return self.lockstep.chunks(dtype, count)

    def amounts(self, amounts: Sequence[int]) -> None:
        """Say sizes along with the first phase."""
        if not self.opened:
            self.lockstep.say_amounts(self.lockstep.phase + 1, amounts)

    def meet(self) -> Steps:
        """Publish what was written, and with the first phase what is called; go on when all have, if they agree."""
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
            lockstep.segment.heads[(lockstep.phase + 1) & 1][lockstep.rank] = self.head
            if not lockstep.publish():
                yield
        self.agreed = True
        if not lockstep.agree(self.head, self.call_check):
            yield from self.refuse()

    def refuse(self) -> Steps:
        """Tell the others in words what was called, and raise the error with every rank's words.

        Raises:
            RefusedError: always.
        """
        lockstep = self.lockstep
        # Different calls may have used different numbers of chunks up to here.
        lockstep.uses = lockstep.phase
        lockstep.uses += 1
        chunks = [lockstep.segment.raw_slot(rank, lockstep.uses & 1) for rank in range(lockstep.size)]
        said = self.call_check.said().encode()[:_WORDS]
        chunks[lockstep.rank][:_WORDS] = said.ljust(_WORDS)
        if not lockstep.publish():
            yield
        words = [bytes(chunk[:_WORDS]).decode(errors="replace").rstrip() for chunk in chunks]
        raise RefusedError(self.call_check.refusal(words))


class RefusedError(Exception):
    """All ranks refuse a call, at the same point: the group is as good as before. Its argument is what to raise."""
