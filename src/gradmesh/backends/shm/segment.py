"""The memory that the ranks of one group share, and who of them is still there."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from gradmesh.backends.shm import bootstrap, futex
from gradmesh.backends.shm.buffers import Buffers, chunk_bytes
from gradmesh.backends.shm.peers import Peers
from gradmesh.backends.shm.runs import run
from gradmesh.errors import GradmeshError

__all__ = ["BROKE", "FAILED", "LEFT", "OPEN", "Segment"]

OPEN, LEFT, BROKE, FAILED = 0, 1, 2, 3
"""What a rank says of itself: it takes part, it has left the group, it gave up and the group with it, or its function
raised an error."""

_LOOK = 0.05
"""Seconds between two looks into the store for ranks that failed."""


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
        self.blames = -1  # the rank that this one last waited for in vain
        self._foreign = False
        if size == 1:
            chunk = chunk_bytes()
            super().__init__(bootstrap.own_memory(chunk), 0, 1, chunk)
            return
        with bootstrap.meeting(store, self.peers, timeout) as met:
            super().__init__(met.memory, rank, size, met.chunk)
            if rank == 0:
                try:
                    self._wait_until_mapped(met, timeout)
                except BaseException:
                    self.say(BROKE)  # to those that have
                    raise

    def _wait_until_mapped(self, met: bootstrap.Met, timeout: float) -> None:
        start = looked = time.monotonic()
        while late := [rank for rank, mapped in enumerate(self.mapped.tolist()) if not mapped]:
            now = time.monotonic()
            self.blames = late[0]
            if self.peers.dead(late) or now - start > timeout:
                raise self.peers.gone(late[0], "it has not mapped the group's memory")
            if now - looked > _LOOK:
                looked = now
                for rank in late:
                    if why := met.failed(rank):
                        self.blames = rank
                        raise self.peers.gone(rank, "it could not map the group's memory", why)
            time.sleep(0.0005)

    def missing(self, ranks: Sequence[int], call: Callable[[], str]) -> GradmeshError | None:
        """The error for waiting for these ranks in vain, if one of them cannot come any more."""
        states = self.states.tolist()
        states[self.rank] = OPEN
        dead = self.peers.dead(self.peers.others)
        for rank in dead:
            # Who gave up did so because of somebody: that one is the news.
            if rank in ranks or BROKE in states:
                return self._blame(rank, self.peers.gone(rank, "its process has ended", call()))
        # One that failed or gave up has left all others out of step, whether it is its turn now or not.
        if FAILED in states:
            rank = states.index(FAILED)
            return self._blame(rank, self.peers.gone(rank, "its function raised an error", call()))
        for rank in ranks:
            if states[rank] == LEFT:
                return self._blame(rank, self.peers.gone(rank, "it has left the group", call()))
            if self._returned(rank):
                return self._blame(rank, self.peers.returned(rank, call()))
        if BROKE in states:
            rank = states.index(BROKE)
            cause = self.blamed[rank] - 1
            if cause in (-1, rank, self.rank):
                why = "it gave up on a call of this group" + " for which this rank was late" * (
                    cause == self.rank
                )
                return self._blame(rank, self.peers.gone(rank, why, call()))
            if self._returned(cause):
                return self._blame(cause, self.peers.returned(cause, call()))
            why = f"rank {self.peers.name(rank)} gave up waiting for it"
            return self._blame(cause, self.peers.gone(cause, why, call()))
        return None

    def _blame(self, rank: int, error: GradmeshError) -> GradmeshError:
        self.blames = rank
        futex.fence()  # whoever asks looks once more whether it has come, as the rank may have said both
        return error

    def _returned(self, rank: int) -> bool:
        return 0 < run.waits <= self.returned[rank]

    def away(self, rank: int) -> bool:
        """Whether a rank has said that nothing will come of it any more."""
        return bool(self.states[rank]) or self._returned(rank)

    def hurt(self, ranks: Sequence[int]) -> bool:
        """Whether a rank has said that it failed or gave up, or one of these that nothing will come of it."""
        states = self.states.tolist()
        return BROKE in states or FAILED in states or any(map(self.away, ranks))

    def say(self, state: int) -> None:
        """Say that this rank has left, failed or given up, and wake whoever waits for it."""
        if self.states[self.rank] == OPEN and not self._foreign:
            self.blamed[self.rank] = 1 + self.blames
            futex.fence()
            self.states[self.rank] = state
            self._wake()

    def say_returned(self) -> None:
        """Say that this rank's function has returned and left nothing under way, and wake whoever waits for it."""
        if not self._foreign:
            futex.fence()
            self.returned[self.rank] = run.number
            self._wake()

    def _wake(self) -> None:
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
