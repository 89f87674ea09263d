"""What time it is on a rank: the machine's, or the rank's own where ranks run one at a time."""

from __future__ import annotations

import abc
import time
from collections.abc import Callable

__all__ = ["Clock", "OwnClocks", "WallClock"]

_POLL = 1e-5
"""Seconds that pass on a rank's own clock when it asks whether a call is over, and it is not."""


class Clock(abc.ABC):
    """The time of every rank, in seconds since the start of the run."""

    @abc.abstractmethod
    def now(self, rank: int | None) -> float:
        """The time on a rank; None: in a thread that is no rank."""

    @abc.abstractmethod
    def until(self, rank: int | None, end: float, check: Callable[[], None]) -> None:
        """Wait for a time; `check` raises where the world has been stopped."""

    @property
    def of_ranks(self) -> bool:
        """Whether each rank has a clock of its own."""
        return False

    def put(self, rank: int, time: float) -> None:
        """Set a rank's own clock."""
        raise NotImplementedError

    def pause(self, rank: int) -> None:  # noqa: B027 - the machine's time goes on
        """From here on the rank does not work: it is the simulator that does, or another rank."""

    def go_on(self, rank: int) -> None:  # noqa: B027
        """The rank works again."""

    def poll(self, rank: int | None) -> None:  # noqa: B027
        """The rank asked whether a call is over, and it is not."""


class WallClock(Clock):
    """The machine's time, the same for all ranks."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def now(self, rank: int | None) -> float:  # noqa: ARG002
        """Seconds since the start."""
        return time.perf_counter() - self._start

    def until(self, rank: int | None, end: float, check: Callable[[], None]) -> None:
        """Sleep."""
        while (left := end - self.now(rank)) > 0:
            time.sleep(min(left, 0.2))
            check()


class OwnClocks(Clock):
    """A clock for each rank, which goes on while that rank works, and jumps when it has waited.

    Args:
        size: the number of ranks.
        compute: what the time is multiplied with that a rank takes for its work: 0 counts communication alone, and
            then the times are the same in every run.
    """

    def __init__(self, size: int, compute: float) -> None:
        self._compute = compute
        self._times = [0.0] * size
        self._since: list[float | None] = [None] * size

    def now(self, rank: int | None) -> float:
        """The rank's time."""
        return 0.0 if rank is None else self._times[rank]

    def until(self, rank: int | None, end: float, check: Callable[[], None]) -> None:  # noqa: ARG002
        """Set the clock."""
        if rank is not None:
            self._times[rank] = max(self._times[rank], end)

    def pause(self, rank: int) -> None:
        """Count what the rank has worked."""
        since, self._since[rank] = self._since[rank], None
        if since is not None:
            self._times[rank] += self._compute * (time.perf_counter() - since)

    def go_on(self, rank: int) -> None:
        """Begin to count."""
        self._since[rank] = time.perf_counter()

    @property
    def of_ranks(self) -> bool:
        """They have."""
        return True

    def put(self, rank: int, time: float) -> None:
        """Set it, forward or back."""
        self._times[rank] = time

    def poll(self, rank: int | None) -> None:
        """Asking takes time, so that a loop which asks ends."""
        if rank is not None:
            self._times[rank] += _POLL
