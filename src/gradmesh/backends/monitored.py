"""The barrier that names the ranks which do not come, as `torch.distributed.monitored_barrier` asks a group for it."""

from __future__ import annotations

import datetime
from typing import Any

from gradmesh.errors import AbortedError, DeadlockError, message

__all__ = ["pass_monitored"]


def pass_monitored(
    work: Any, place: int, timeout: datetime.timedelta, wait_all_ranks: bool, group: str
) -> None:
    """Wait for a barrier that was begun; an error names who is missing.

    The sentences are those of Gloo, since programs and torch's own tests look for them.

    Args:
        work: the barrier's work, whose `late()` gives the ranks of the group that have not come.
        place: this rank in the group. Rank 0 waits as long as `timeout`; the others wait for rank 0, as long as the
            group's timeout allows.
        timeout: how long rank 0 waits; zero for not at all.
        wait_all_ranks: name all ranks that are missing in the first line, and not only the first of them.
        group: the group in words.

    Raises:
        DeadlockError: a rank did not come in time.
        AbortedError: a rank has gone, or rank 0 gave up.
    """
    try:
        # A work takes a timeout of zero for the group's.
        work.wait(max(timeout, datetime.timedelta.resolution) if place == 0 else None)
    except (AbortedError, DeadlockError) as error:
        late: list[int] = work.late()
        missing = ", ".join(f"rank {rank}" for rank in late)
        raise type(error)(
            message(
                _problem(place, late if wait_all_ranks else late[:1], timeout, wait_all_ranks),
                axis=group,
                expected="every rank of the group in this barrier",
                got=f"none from {missing}\n{error}" if late else str(error),
                remedy="look where the ranks that are missing are instead",
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
