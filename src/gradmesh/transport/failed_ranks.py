"""Name the failed rank where a torch backend only reports a closed connection or a timeout.

A rank whose call failed sets a key in the group's store and checks which other ranks set theirs. A rank that has
exited, has returned or is busy elsewhere sets none.
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
"""Seconds that the other ranks get to set their keys; they notice a lost connection at nearly the same time."""
_POLL = 0.02


@contextlib.contextmanager
def failed_ranks_named(axis: Axis) -> Iterator[None]:
    """Turn a backend error in this block into one that names the ranks which did not respond.

    Raises:
        AbortedError: the backend failed, and some ranks of the axis did not respond.
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
    """The ranks of the axis that do not set their key; empty if the group has no store."""
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
            f"rank{'s' * (len(missing) > 1)} {names} did not respond, and the backend failed",
            axis=str(axis),
            expected="every rank of the axis makes this call",
            got=str(error).splitlines()[0],
            remedy=f"check whether that rank raised, exited or is busy elsewhere; otherwise {RETURNED_REMEDY}",
        ),
        rank=ranks[missing[0]],
    )
