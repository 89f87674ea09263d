"""The processes of a group, and whether they are alive.

A process is watched through its pidfd, which stays valid if the process id is reused.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Sequence

from gradmesh.backends.messages import RETURNED_REMEDY
from gradmesh.errors import AbortedError, DeadlockError, message

__all__ = ["Peers"]


class Peers:
    """The ranks of a group.

    Args:
        rank: this rank.
        size: the number of ranks.
        names: their global ranks.
        group: the group's name, for errors.

    Attributes:
        pids: the ranks' process ids, after the bootstrap.
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
            AbortedError: one of them has exited.
        """
        self.pids = list(pids)
        for rank, pid in enumerate(self.pids):
            if rank == self.rank:
                continue
            try:
                self._pidfds[rank] = os.pidfd_open(pid)
            except ProcessLookupError as error:
                raise self.gone_error(rank, "its process has exited") from error
            self._poll.register(self._pidfds[rank], select.POLLIN)

    def dead(self, ranks: Sequence[int]) -> list[int]:
        """The ranks whose processes have exited."""
        with self._lock:  # only one thread at a time may use a poll object
            ended = {fd for fd, _ in self._poll.poll(0)}
            return [rank for rank in ranks if self._pidfds.get(rank) in ended]

    def gone_error(self, rank: int, why: str, call: str | None = None) -> AbortedError:
        """The error for a rank that no longer responds."""
        return AbortedError(
            message(
                f"rank {self.name(rank)} does not respond: {why}",
                axis=f"group '{self.group}', rank {self.rank} of {self.size}",
                got=call,
                remedy=f"check the error or exit code of that rank; if there is none, {RETURNED_REMEDY}",
            ),
            rank=self.names[rank],
        )

    def returned(self, rank: int, call: str) -> DeadlockError:
        """The error for a rank whose function has returned."""
        return DeadlockError(
            message(
                f"rank {self.name(rank)} has returned, and the others wait for it",
                axis=f"group '{self.group}', rank {self.rank} of {self.size}",
                expected="the same call on that rank before its function returns",
                got=call,
                remedy=RETURNED_REMEDY,
            )
        )

    def name(self, rank: int) -> str:
        """A rank for errors, with its global rank if that differs, and its process id."""
        world = "" if self.names[rank] == rank else f" (global rank {self.names[rank]})"
        return f"{rank}{world}, process {self.pids[rank]},"

    def reset_after_fork(self) -> None:
        """Reset after fork: a lock that was held in the parent would never be released."""
        self._lock = threading.Lock()

    def close(self) -> None:
        """Stop watching."""
        with self._lock:
            for fd in self._pidfds.values():
                os.close(fd)
            self._pidfds.clear()
            self._poll = select.poll()
