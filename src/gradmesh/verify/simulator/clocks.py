"""The time on a rank: wall-clock time, or a virtual clock for each rank if ranks run one at a time."""

from __future__ import annotations

import abc
import time
from collections.abc import Callable

__all__ = ["Clock", "VirtualClocks", "WallClock"]

_POLL = 1e-5
"""Seconds that pass on a rank's virtual clock when it polls a pending call."""


class Clock(abc.ABC):
    """The time of every rank, in seconds since the start of the run."""

    @abc.abstractmethod
    def now(self, rank: int | None) -> float:
        """The time on a rank; None: in a thread that does not belong to a rank."""

    @abc.abstractmethod
    def until(self, rank: int | None, end: float, check: Callable[[], None]) -> None:
        """Wait until a time; `check` raises if the world has been stopped."""

    @property
    def of_ranks(self) -> bool:
        """Whether each rank has a virtual clock."""
        return False

    def put(self, rank: int, time: float) -> None:
        """Set a rank's virtual clock."""
        raise NotImplementedError

    def pause(self, rank: int) -> None:  # noqa: B027 - no effect on wall-clock time
        """Stop counting: from here on the simulator or another rank runs."""

    def resume(self, rank: int) -> None:  # noqa: B027
        """Count again: the rank runs."""

    def poll(self, rank: int | None) -> None:  # noqa: B027
        """The rank polled a pending call."""


class WallClock(Clock):
    """Wall-clock time, the same for all ranks."""

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


class VirtualClocks(Clock):
    """A clock for each rank, which advances while that rank runs, and is set forward when it has waited.

    Args:
        size: the number of ranks.
        compute: the factor of a rank's computation time; 0 counts communication only, which makes the times
            reproducible.
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
        """Add the time since `resume`."""
        since, self._since[rank] = self._since[rank], None
        if since is not None:
            self._times[rank] += self._compute * (time.perf_counter() - since)

    def resume(self, rank: int) -> None:
        """Start to count."""
        self._since[rank] = time.perf_counter()

    @property
    def of_ranks(self) -> bool:
        """True."""
        return True

    def put(self, rank: int, time: float) -> None:
        """Set the clock, forward or back."""
        self._times[rank] = time

    def poll(self, rank: int | None) -> None:
        """Advance the clock, so that a polling loop ends."""
        if rank is not None:
            self._times[rank] += _POLL
