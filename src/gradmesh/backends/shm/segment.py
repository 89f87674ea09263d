"""The shared memory of a group, and the state of its ranks."""

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
"""The published state of a rank: active, left the group, aborted the group, or its function raised an error."""

_LOOK = 0.05
"""Seconds between two checks of the store for failed ranks."""


class Segment(Buffers):
    """The shared memory of a group on one rank.

    Args:
        store: the store for the rendezvous; not needed for one rank.
        rank: this rank.
        size: the number of ranks.
        names: their global ranks.
        timeout: seconds to wait for the others.
        group: the group's name, for errors.
    """

    def __init__(
        self, store: Any, rank: int, size: int, names: Sequence[int], timeout: float, group: str
    ) -> None:
        self.peers = Peers(rank, size, names, group)
        self.blame = -1  # the rank that caused the last failed wait
        self._foreign = False
        if size == 1:
            chunk = chunk_bytes()
            super().__init__(bootstrap.own_memory(chunk), 0, 1, chunk)
            return
        with bootstrap.meeting(store, self.peers, timeout) as boot:
            super().__init__(boot.memory, rank, size, boot.chunk)
            if rank == 0:
                try:
                    self._wait_until_mapped(boot, timeout)
                except BaseException:
                    self.publish_state(BROKE)  # for the ranks that have mapped it
                    raise

    def _wait_until_mapped(self, boot: bootstrap.Bootstrapped, timeout: float) -> None:
        start = looked = time.monotonic()
        while late := [rank for rank, mapped in enumerate(self.mapped.tolist()) if not mapped]:
            now = time.monotonic()
            self.blame = late[0]
            if self.peers.dead(late) or now - start > timeout:
                raise self.peers.gone_error(late[0], "it has not mapped the group's memory")
            if now - looked > _LOOK:
                looked = now
                for rank in late:
                    if why := boot.failed(rank):
                        self.blame = rank
                        raise self.peers.gone_error(rank, "it could not map the group's memory", why)
            time.sleep(0.0005)

    def missing(self, ranks: Sequence[int], call: Callable[[], str]) -> GradmeshError | None:
        """The error if one of these ranks can no longer make the call; else None."""
        states = self.states.tolist()
        states[self.rank] = OPEN
        dead = self.peers.dead(self.peers.others)
        for rank in dead:
            # If a rank aborted, report the rank that caused it.
            if rank in ranks or BROKE in states:
                return self._blame(rank, self.peers.gone_error(rank, "its process has exited", call()))
        # A rank that failed or aborted leaves all others out of sync, whether they wait for it or not.
        if FAILED in states:
            rank = states.index(FAILED)
            return self._blame(rank, self.peers.gone_error(rank, "its function raised an error", call()))
        for rank in ranks:
            if states[rank] == LEFT:
                return self._blame(rank, self.peers.gone_error(rank, "it has left the group", call()))
            if self._returned(rank):
                return self._blame(rank, self.peers.returned(rank, call()))
        if BROKE in states:
            rank = states.index(BROKE)
            cause = self.blamed[rank] - 1
            if cause in (-1, rank, self.rank):
                why = "it aborted a call of this group" + " because this rank timed out" * (
                    cause == self.rank
                )
                return self._blame(rank, self.peers.gone_error(rank, why, call()))
            if self._returned(cause):
                return self._blame(cause, self.peers.returned(cause, call()))
            why = f"rank {self.peers.name(rank)} timed out waiting for it"
            return self._blame(cause, self.peers.gone_error(cause, why, call()))
        return None

    def _blame(self, rank: int, error: GradmeshError) -> GradmeshError:
        self.blame = rank
        futex.fence()  # the caller checks for arrival again, since the rank may have published before it left
        return error

    def _returned(self, rank: int) -> bool:
        return 0 < run.waits <= self.returned[rank]

    def away(self, rank: int) -> bool:
        """Whether a rank has left, failed, aborted or returned."""
        return bool(self.states[rank]) or self._returned(rank)

    def has_failures(self, ranks: Sequence[int]) -> bool:
        """Whether any rank has failed or aborted, or one of the given ranks is away."""
        states = self.states.tolist()
        return BROKE in states or FAILED in states or any(map(self.away, ranks))

    def publish_state(self, state: int) -> None:
        """Publish that this rank has left, failed or aborted, and wake its waiters."""
        if self.states[self.rank] == OPEN and not self._foreign:
            self.blamed[self.rank] = 1 + self.blame
            futex.fence()
            self.states[self.rank] = state
            self._wake()

    def publish_returned(self) -> None:
        """Publish that this rank's function has returned without pending calls, and wake its waiters."""
        if not self._foreign:
            futex.fence()
            self.returned[self.rank] = run.number
            self._wake()

    def _wake(self) -> None:
        futex.wake(self.word(self.rank))
        for other in range(self.size):
            futex.wake(self.written_word(self.rank * self.size + other))
            futex.wake(self.read_word(other * self.size + self.rank))

    def reset_after_fork(self) -> None:
        """Reset after fork: the child must not write the parent's state."""
        self._foreign = True
        self.peers.reset_after_fork()

    def close(self) -> None:
        """Stop watching the other processes. The memory is released with its last view."""
        self.peers.close()
