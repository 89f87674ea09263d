"""Which rank is lost, where a backend of torch only says that a connection was closed or that the time is over.

A rank whose call failed leaves word in the store of the group, and sees who else has. A rank that has ended, has
returned, or is busy elsewhere leaves none.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from gradmesh.axis import Axis
from gradmesh.backends.messages import RETURNED_REMEDY
from gradmesh.errors import AbortedError, GradmeshError, message

__all__ = ["failed_ranks_named"]

_GRACE = 0.4
"""Seconds that the others get to leave word; they notice a lost connection at nearly the same time."""
_POLL = 0.02


@contextlib.contextmanager
def failed_ranks_named(axis: Axis) -> Iterator[None]:
    """Turn an error of a backend in here into one that names the ranks which were not heard of.

    Raises:
        AbortedError: the backend failed, and some ranks of the axis left no word.
    """
    try:
        yield
    except GradmeshError:
        raise
    except RuntimeError as error:
        missing = _unresponsive(axis)
        if not missing:
            raise
        raise _error(axis, missing, error) from error


def _unresponsive(axis: Axis) -> list[int]:
    """The ranks of the axis that leave no word; none of them if there is no store to leave it in."""
    with contextlib.suppress(Exception):
        store: Any = axis.group.get_group_store()
        store.set(f"lost/{axis.rank}", "1")
        missing = [rank for rank in range(axis.size) if rank != axis.rank]
        deadline = time.monotonic() + _GRACE
        while missing and time.monotonic() < deadline:
            time.sleep(_POLL)
            missing = [rank for rank in missing if not store.check([f"lost/{rank}"])]
        return missing
    return []


def _error(axis: Axis, missing: list[int], error: RuntimeError) -> AbortedError:
    ranks = axis.global_ranks
    names = ", ".join(str(ranks[rank]) for rank in missing)
    return AbortedError(
        message(
            f"rank{'s' * (len(missing) > 1)} {names} did not answer, and the backend gave up",
            axis=str(axis),
            expected="every rank of the axis in this call",
            got=str(error).splitlines()[0],
            remedy=f"see the error or the exit of that rank, or what it is busy with; else {RETURNED_REMEDY}",
        ),
        rank=ranks[missing[0]],
    )
