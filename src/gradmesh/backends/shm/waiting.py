"""How a process rank waits: it spins for a short time, then sleeps in the kernel.

While spinning it yields its core to its peers: with four ranks on two cores that halves the time of a barrier, compared
with sleeping immediately. While sleeping it wakes every 50 ms to check whether the others are alive and whether it has
timed out; the awaited event wakes it immediately. (Spinning before sleeping is competitive: if the spin takes as long
as a sleep costs, it takes at most twice the time of the better of the two. Karlin, Li, Manasse, Owicki 1991, "Empirical
studies of competitive spinning for a shared-memory multiprocessor".)
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from gradmesh.backends.messages import SAME_CALLS, timed_out_text
from gradmesh.backends.shm import futex
from gradmesh.backends.shm.progress import LOOK, progress, unfinished
from gradmesh.backends.shm.segment import BROKE, Segment
from gradmesh.errors import DeadlockError, message

if TYPE_CHECKING:
    from gradmesh.backends.shm.engine import Engine

__all__ = ["late", "spins", "until"]

_SLICE = 0.0005
"""Maximum seconds per sleep while the rank has pending calls on other groups."""
_SPINS = 300
_SPINS_OVERSUBSCRIBED = 50

_most_ranks = 1


def spins(ranks: int) -> int:
    """The number of spins before sleeping; depends on the size of the process's largest group."""
    global _most_ranks
    _most_ranks = max(_most_ranks, ranks)
    return _SPINS if _most_ranks <= len(os.sched_getaffinity(0)) else _SPINS_OVERSUBSCRIBED


def until(
    ready: Callable[[], bool],
    word: Callable[[], tuple[int, int] | None],
    needs: Callable[[], Sequence[int]],
    engine: Engine,
    seconds: float,
    call: Callable[[], str],
    *,
    in_call: bool,
) -> None:
    """Wait until `ready`.

    Args:
        ready: returns whether the awaited event has happened.
        word: returns the address of a word that changes before it, and its current value; None if there is none.
        needs: returns the ranks that it depends on.
        engine: the waiting engine.
        seconds: the timeout.
        call: returns the description of the call, for the error.
        in_call: whether it is a collective of the group, else a message.

    Raises:
        AbortedError: a rank that it depends on is gone.
        DeadlockError: the wait timed out.
    """
    for _ in range(engine.spins):
        if ready():
            return
        os.sched_yield()
    segment = engine.segment
    start = looked = time.monotonic()
    while True:
        others = bool(unfinished()) and progress(engine, in_call)
        sleep = word()
        if ready():
            return
        if sleep is None or others:
            time.sleep(_SLICE) if sleep is None else futex.wait(*sleep, _SLICE)
        else:
            futex.wait(*sleep, min(LOOK, max(0.0, start + seconds - time.monotonic())))
        if ready():
            return
        now = time.monotonic()
        if now - looked >= LOOK or segment.has_failures(needs()):
            looked = now
            gone_error = segment.missing(needs(), call)
            # The rank may have published and left between the two checks.
            if gone_error is not None and not ready():
                raise gone_error
        if now - start > seconds and not ready():
            error = late(segment, needs() or segment.peers.others, seconds, call())
            segment.publish_state(BROKE)
            raise error


def late(segment: Segment, needs: Sequence[int], seconds: float, call: str) -> DeadlockError:
    """The error of a call that timed out."""
    peers = segment.peers
    segment.blame = needs[0]
    names = ", ".join(peers.name(rank) for rank in needs).rstrip(",")
    return DeadlockError(
        message(
            timed_out_text([peers.names[rank] for rank in needs], seconds),
            axis=f"group '{peers.group}', rank {peers.rank} of {peers.size}",
            expected=f"the same call on rank {names}",
            got=call,
            remedy=f"check what that rank does instead: {SAME_CALLS}; or set a longer timeout for the group",
        )
    )
