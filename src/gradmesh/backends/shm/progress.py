"""How a rank that is a process waits: it looks again and again for a moment, then sleeps in the kernel.

Between two looks it lets others have its core, so that a peer that waits for one gets it: with four ranks on two cores
that halves the time of a barrier against sleeping at once. Asleep, a rank wakes up every 50 ms to see whether the
others are alive and whether its time is over; what it waits for wakes it at once.

While it waits for one group, a rank goes on with what it has begun on others: otherwise two ranks could each wait for
a call that the other has begun and not finished. And what was begun goes on, at a slower pace, when the rank waits for
nothing of this backend: a thread sees to it every other millisecond as long as there is such a call.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from gradmesh.backends.shm import futex
from gradmesh.backends.shm.segment import BROKE, Segment
from gradmesh.errors import DeadlockError, message

if TYPE_CHECKING:
    from gradmesh.backends.shm.group import ShmGroup

__all__ = ["LOOK", "busy", "forget", "idle", "in_background", "progress", "spins", "until"]

LOOK = 0.05
"""Seconds between two looks at the other processes."""
_SLICE = 0.0005
"""Seconds that a rank sleeps at once while it has unfinished calls on other groups."""
_SPINS = 300
_SPINS_OVERSUBSCRIBED = 50

_lock = threading.Lock()
_unfinished: weakref.WeakSet[ShmGroup] = weakref.WeakSet()
_most_ranks = 1


def busy(group: ShmGroup) -> None:
    """Say that a group has calls that were begun and are not finished."""
    with _lock:
        _unfinished.add(group)


def idle(group: ShmGroup) -> None:
    """Say that it has none any more."""
    with _lock:
        _unfinished.discard(group)


class _Helper:
    """The thread that goes on with what was begun; started when it is needed first."""

    pause = 0.002
    linger = 50
    """Pauses with nothing to do after which it sleeps until it is needed again."""

    def __init__(self) -> None:
        self.needed = threading.Event()
        self.over = False
        self.starting = threading.Lock()
        self.thread = threading.Thread(target=self._run, name="gradmesh shm", daemon=True)

    def need(self) -> None:
        if not self.needed.is_set():
            self.needed.set()
        if self.thread.ident is None:
            with self.starting:
                if self.thread.ident is None:
                    self.thread.start()
                    atexit.register(self.end)

    def end(self) -> None:
        self.over = True
        self.needed.set()
        self.thread.join(1)

    def _run(self) -> None:
        idle_for = 0
        while not self.over:
            self.needed.wait()
            time.sleep(self.pause)
            idle_for = 0 if self._go_on() else idle_for + 1
            if idle_for > self.linger:
                self.needed.clear()
                if self._go_on():  # begun since the last look
                    self.needed.set()

    def _go_on(self) -> bool:
        with contextlib.suppress(Exception):  # whoever waits for the call gets it
            progress()
        return bool(_unfinished)


_helper = _Helper()


def in_background() -> None:
    """Go on with what was begun also while the rank does something else."""
    _helper.need()


def forget() -> None:
    """In a forked child: what the parent has begun is not its business."""
    global _lock, _helper
    _lock, _helper = threading.Lock(), _Helper()
    _unfinished.clear()


def spins(ranks: int) -> int:
    """How often to look before sleeping, for a group of so many ranks; the largest group of the process decides."""
    global _most_ranks
    _most_ranks = max(_most_ranks, ranks)
    return _SPINS if _most_ranks <= len(os.sched_getaffinity(0)) else _SPINS_OVERSUBSCRIBED


def until(
    ready: Callable[[], bool],
    word: Callable[[], tuple[int, int] | None],
    needs: Callable[[], Sequence[int]],
    group: ShmGroup,
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
        group: who waits.
        seconds: how long at most.
        call: what was called, for the error text.
        in_call: whether that is a collective of the group, else a message.

    Raises:
        AbortedError: a rank that it needs has gone.
        DeadlockError: the time is over.
    """
    segment = group.segment
    for _ in range(group.spins):
        if ready():
            return
        os.sched_yield()
    start = looked = time.monotonic()
    while True:
        others = bool(_unfinished) and progress(group, in_call)
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
            segment.say(BROKE)
            raise _late(segment, needs() or segment.others, seconds, call())


def progress(waiting: ShmGroup | None = None, in_call: bool = False) -> bool:
    """Go on with the unfinished calls of all groups; whether there are any besides what is waited for."""
    with _lock:
        groups = list(_unfinished)
    others = False
    for group in groups:
        mine = group is waiting
        others |= group.poll(in_call=mine and in_call, in_message=mine and not in_call)
    return others


def _late(segment: Segment, needs: Sequence[int], seconds: float, call: str) -> DeadlockError:
    late = ", ".join(segment.name(rank) for rank in needs).rstrip(",")
    return DeadlockError(
        message(
            f"nothing came for {seconds:g} s, the timeout of the group",
            axis=f"group '{segment.group}', rank {segment.rank} of {segment.size}",
            expected=f"the same call on rank {late}",
            got=call,
            remedy="let every rank of the group make the same calls, in one order; or give a longer timeout",
        )
    )
