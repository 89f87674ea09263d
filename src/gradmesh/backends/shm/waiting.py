"""How a rank that is a process waits: it looks again and again for a moment, then sleeps in the kernel.

Between two looks it lets others have its core, so that a peer that waits for one gets it: with four ranks on two cores
that halves the time of a barrier against sleeping at once. Asleep, a rank wakes up every 50 ms to see whether the
others are alive and whether its time is over; what it waits for wakes it at once. (Spinning first and sleeping then is
competitive: with a spin as long as a sleep costs, it takes at most twice the time of the better of the two. Karlin, Li,
Manasse, Owicki 1991, "Empirical studies of competitive spinning for a shared-memory multiprocessor".)
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from gradmesh.backends.shm import futex
from gradmesh.backends.shm.progress import LOOK, progress, unfinished
from gradmesh.backends.shm.segment import BROKE, Segment
from gradmesh.backends.words import SAME_CALLS, nothing_came
from gradmesh.errors import DeadlockError, message

if TYPE_CHECKING:
    from gradmesh.backends.shm.engine import Engine

__all__ = ["late", "spins", "until"]

_SLICE = 0.0005
"""Seconds that a rank sleeps at once while it has unfinished calls on other groups."""
_SPINS = 300
_SPINS_OVERSUBSCRIBED = 50

_most_ranks = 1


def spins(ranks: int) -> int:
    """How often to look before sleeping, for a group of so many ranks; the largest group of the process decides."""
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
        ready: whether it has come.
        word: the address of a word that changes before it comes, and its value now; None if there is no such word.
        needs: the ranks that it still has to come from.
        engine: who waits.
        seconds: how long at most.
        call: what was called, for the error text.
        in_call: whether that is a collective of the group, else a message.

    Raises:
        AbortedError: a rank that it needs has gone.
        DeadlockError: the time is over.
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
        if now - looked >= LOOK or segment.hurt(needs()):
            looked = now
            gone = segment.missing(needs(), call)
            # It may have published and left between the two looks.
            if gone is not None and not ready():
                raise gone
        if now - start > seconds and not ready():
            error = late(segment, needs() or segment.peers.others, seconds, call())
            segment.say(BROKE)
            raise error


def late(segment: Segment, needs: Sequence[int], seconds: float, call: str) -> DeadlockError:
    """The error of a call for which the others did not come in time."""
    peers = segment.peers
    segment.blames = needs[0]
    names = ", ".join(peers.name(rank) for rank in needs).rstrip(",")
    return DeadlockError(
        message(
            nothing_came([peers.names[rank] for rank in needs], seconds),
            axis=f"group '{peers.group}', rank {peers.rank} of {peers.size}",
            expected=f"the same call on rank {names}",
            got=call,
            remedy=f"look where that rank is instead: {SAME_CALLS}; or give a longer timeout",
        )
    )
