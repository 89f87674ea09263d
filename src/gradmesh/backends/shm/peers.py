"""The other processes of a group: who they are, and whether they are still there.

A process is watched through its pidfd, which stands for that process and no later one of the same number.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Sequence

from gradmesh.backends.words import RETURNED_REMEDY
from gradmesh.errors import AbortedError, DeadlockError, message

__all__ = ["Peers"]


class Peers:
    """The ranks of a group, as one of them sees them.

    Args:
        rank: this rank.
        size: the number of ranks.
        names: their ranks in the world.
        group: the group's name, for error texts.

    Attributes:
        pids: the ranks' processes, once the ranks have found each other.
    """

    def __init__(self, rank: int, size: int, names: Sequence[int], group: str) -> None:
        self.rank, self.size, self.names, self.group = rank, size, names, group
        self.others = [other for other in range(size) if other != rank]
        self.pids = [os.getpid()] * size
        self._pidfds: dict[int, int] = {}
        self._poll = select.poll()
        self._lock = threading.Lock()

    def watch(self, pids: Sequence[int]) -> None:
        """Watch these processes.

        Raises:
            AbortedError: one of them has ended.
        """
        self.pids = list(pids)
        for rank, pid in enumerate(self.pids):
            if rank == self.rank:
                continue
            try:
                self._pidfds[rank] = os.pidfd_open(pid)
            except ProcessLookupError as error:
                raise self.gone(rank, "its process has ended") from error
            self._poll.register(self._pidfds[rank], select.POLLIN)

    def dead(self, ranks: Sequence[int]) -> list[int]:
        """Which of these ranks' processes have ended."""
        with self._lock:  # several threads of a rank may wait, and Python lets only one of them poll
            ended = {fd for fd, _ in self._poll.poll(0)}
            return [rank for rank in ranks if self._pidfds.get(rank) in ended]

    def gone(self, rank: int, why: str, call: str | None = None) -> AbortedError:
        """The error for waiting for a rank in vain."""
        return AbortedError(
            message(
                f"rank {self.name(rank)} does not answer: {why}",
                axis=f"group '{self.group}', rank {self.rank} of {self.size}",
                got=call,
                remedy=f"see the error or the exit of that rank; if it has none, {RETURNED_REMEDY}",
            ),
            rank=self.names[rank],
        )

    def returned(self, rank: int, call: str) -> DeadlockError:
        """The error for waiting for a rank whose function has returned."""
        return DeadlockError(
            message(
                f"rank {self.name(rank)} has returned, and the others wait for it",
                axis=f"group '{self.group}', rank {self.rank} of {self.size}",
                expected="the same call there, before its function is over",
                got=call,
                remedy=RETURNED_REMEDY,
            )
        )

    def name(self, rank: int) -> str:
        """A rank for error texts, with its rank in the world where that is another number, and its process."""
        world = "" if self.names[rank] == rank else f" (global rank {self.names[rank]})"
        return f"{rank}{world}, process {self.pids[rank]},"

    def forget(self) -> None:
        """In a forked child: a lock that the parent held is held for ever."""
        self._lock = threading.Lock()

    def close(self) -> None:
        """Stop watching."""
        with self._lock:
            for fd in self._pidfds.values():
                os.close(fd)
            self._pidfds.clear()
            self._poll = select.poll()
