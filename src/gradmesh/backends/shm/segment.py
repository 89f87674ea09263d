"""The memory that the ranks of one group share, and who of them is still there."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from gradmesh.backends.shm import bootstrap, futex
from gradmesh.backends.shm.buffers import Buffers, chunk_bytes
from gradmesh.backends.shm.peers import Peers
from gradmesh.errors import GradmeshError

__all__ = ["BROKE", "LEFT", "OPEN", "Segment"]

OPEN, LEFT, BROKE = 0, 1, 2
"""What a rank says of itself: it takes part, it has left the group, or it gave up and the group with it."""


class Segment(Buffers):
    """The shared memory of a group, as one of its ranks sees it.

    Args:
        store: where the ranks find each other; not needed for one rank.
        rank: this rank.
        size: the number of ranks.
        names: their ranks in the world.
        timeout: how many seconds to wait for the others.
        group: the group's name, for error texts.
    """

    def __init__(
        self, store: Any, rank: int, size: int, names: Sequence[int], timeout: float, group: str
    ) -> None:
        self.peers = Peers(rank, size, names, group)
        self._foreign = False
        if size == 1:
            chunk = chunk_bytes()
            super().__init__(bootstrap.own_memory(chunk), 0, 1, chunk)
            return
        with bootstrap.meeting(store, self.peers, timeout) as (memory, chunk):
            super().__init__(memory, rank, size, chunk)
            if rank == 0:
                self._wait_until_mapped(timeout)

    def _wait_until_mapped(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while not all(self.mapped):
            late = [rank for rank, mapped in enumerate(self.mapped) if not mapped]
            if self.peers.dead(late) or time.monotonic() > deadline:
                raise self.peers.gone(late[0], "it has not mapped the group's memory")
            time.sleep(0.0005)

    def missing(self, ranks: Sequence[int], call: Callable[[], str]) -> GradmeshError | None:
        """The error for waiting for these ranks in vain, if one of them cannot come any more."""
        dead = self.peers.dead(self.peers.others)
        for rank in dead:
            # Who gave up did so because of somebody: that one is the news.
            if rank in ranks or BROKE in self.states.tolist():
                return self.peers.gone(rank, "its process has ended", call())
        for rank in ranks:
            if self.states[rank] == LEFT:
                return self.peers.gone(rank, "it has left the group", call())
        # One that gave up has left all others out of step, whether it is its turn now or not.
        for rank in self.peers.others:
            if self.states[rank] == BROKE:
                return self.peers.gone(rank, "it gave up on a call of this group", call())
        return None

    def hurt(self, ranks: Sequence[int]) -> bool:
        """Whether a rank has said that it gave up, or one of these that it left."""
        states = self.states.tolist()
        return BROKE in states or any(states[rank] for rank in ranks)

    def say(self, state: int) -> None:
        """Say that this rank has left, or given up, and wake whoever waits for it."""
        if self.states[self.rank] == OPEN and not self._foreign:
            self.states[self.rank] = state
            futex.wake(self.word(self.rank))
            for other in range(self.size):
                futex.wake(self.written_word(self.rank * self.size + other))
                futex.wake(self.read_word(other * self.size + self.rank))

    def forget(self) -> None:
        """In a forked child: the place in the group is the parent's, and what is said there is its to say."""
        self._foreign = True
        self.peers.forget()

    def close(self) -> None:
        """Stop watching the other processes. The memory goes when the last view of it does."""
        self.peers.close()
