"""Implements `torch.distributed.monitored_barrier`, which names the missing ranks."""

from __future__ import annotations

import datetime
from typing import Any

from gradmesh.errors import AbortedError, DeadlockError, message

__all__ = ["pass_monitored"]


def pass_monitored(
    work: Any, place: int, timeout: datetime.timedelta, wait_all_ranks: bool, group: str
) -> None:
    """Wait for a pending barrier; the error names the missing ranks.

    The first line has Gloo's text, because programs and torch's tests search for it.

    Args:
        work: the barrier's work; its `late()` returns the missing ranks of the group.
        place: this rank in the group. Rank 0 waits for `timeout`; others wait for rank 0, up to the group's timeout.
        timeout: how long rank 0 waits; zero: not at all.
        wait_all_ranks: name all missing ranks in the first line instead of the first one.
        group: the group's description.

    Raises:
        DeadlockError: a rank did not reach the barrier in time.
        AbortedError: a rank has failed or left, or rank 0 timed out.
    """
    try:
        # A timeout of zero would mean the group's timeout.
        work.wait(max(timeout, datetime.timedelta.resolution) if place == 0 else None)
    except (AbortedError, DeadlockError) as error:
        late: list[int] = work.late()
        missing = ", ".join(f"rank {rank}" for rank in late)
        raise type(error)(
            message(
                _problem(place, late if wait_all_ranks else late[:1], timeout, wait_all_ranks),
                axis=group,
                expected="this barrier on every rank of the group",
                got=f"missing: {missing}\n{error}" if late else str(error),
                remedy="check the missing ranks for an exception, an early return or a different collective",
            )
        ) from error


def _problem(place: int, missing: list[int], timeout: datetime.timedelta, several: bool) -> str:
    if place or not missing:
        return (
            f"Rank {place} successfully reached monitoredBarrier, but received errors while waiting for send/recv "
            "from rank 0"
        )
    time = f"{round(timeout.total_seconds() * 1000)} ms"
    ranks = f"Rank{'s' * several} {', '.join(map(str, missing))}"
    return f"Rank 0 timed out in monitoredBarrier after {time}: {ranks} failed to pass monitoredBarrier in {time}"
