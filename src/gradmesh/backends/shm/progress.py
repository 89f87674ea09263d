"""The progress engine: what goes on with calls that were begun, while their rank does something else.

While it waits for one group, a rank goes on with what it has begun on others: otherwise two ranks could each wait for
a call that the other has begun and not finished. When it waits for nothing of this backend, a thread takes over
(`in_background`): it sleeps on the word of the call that is next, so that it wakes up when the others have come, and
otherwise only to look whether they are alive. With nothing begun but what another thread waits for, it sleeps for
good.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING

from gradmesh.backends.shm import futex

if TYPE_CHECKING:
    from gradmesh.backends.shm.engine import Engine

__all__ = ["LOOK", "busy", "forget", "idle", "in_background", "progress", "unfinished", "waiting"]

LOOK = 0.05
"""Seconds between two looks at the other processes."""
PAUSE = 0.002
"""Seconds between two looks at several things that have no word in common to sleep on."""

_lock = threading.Lock()
_unfinished: weakref.WeakSet[Engine] = weakref.WeakSet()
_waited_for: list[Engine] = []


def busy(engine: Engine) -> None:
    """Say that a group has calls that were begun and are not finished."""
    with _lock:
        _unfinished.add(engine)


def idle(engine: Engine) -> None:
    """Say that it has none any more."""
    with _lock:
        _unfinished.discard(engine)


def unfinished() -> list[Engine]:
    """The groups that have such calls."""
    with _lock:
        return list(_unfinished)


def progress(waiting: Engine | None = None, in_call: bool = False) -> bool:
    """Go on with the unfinished calls of all groups; whether there are any besides what is waited for."""
    others = False
    for engine in unfinished():
        mine = engine is waiting
        others |= engine.poll(in_call=mine and in_call, in_message=mine and not in_call)
    return others


@contextlib.contextmanager
def waiting(engine: Engine) -> Iterator[None]:
    """The calling thread waits in here for something of this group, and goes on with all of it."""
    with _lock:
        _waited_for.append(engine)
    try:
        yield
    finally:
        with _lock:
            _waited_for.remove(engine)
            left = engine in _unfinished
        if left:
            _helper.resume()


def _left_alone() -> list[Engine]:
    """The groups with unfinished calls for which nobody waits."""
    with _lock:
        return [engine for engine in _unfinished if engine not in _waited_for]


def _poll_left_alone() -> None:
    for engine in _left_alone():
        with contextlib.suppress(Exception):  # whoever waits for the call gets it
            engine.poll()


class _Helper:
    """The thread that goes on with what was begun; started when it is needed first."""

    def __init__(self) -> None:
        self.needed = threading.Event()
        self.over = False
        self.starting = threading.Lock()
        self.thread = threading.Thread(target=self._run, name="gradmesh shm", daemon=True)
        self.version = 0
        self.asleep_on: int | None = None

    def need(self, asleep_on: int | None = None) -> None:
        """Take over from now on; something new has been begun, which is to be waited for with this word."""
        self.version += 1
        if not self.needed.is_set():
            self.needed.set()
        elif self.asleep_on not in (None, asleep_on):
            self._wake()
        if self.thread.ident is None:
            with self.starting:
                if self.thread.ident is None:
                    self.thread.start()
                    atexit.register(self.end)

    def resume(self) -> None:
        """Take over again, if it ever was needed."""
        if self.thread.ident is not None:
            self.needed.set()

    def end(self) -> None:
        """Stop, when the process does."""
        self.over = True
        self.needed.set()
        self._wake()
        self.thread.join(1)

    def _wake(self) -> None:
        address = self.asleep_on
        if address is not None:
            futex.wake(address)

    def _run(self) -> None:
        while True:
            self.needed.wait()
            if self.over:
                return
            version = self.version
            _poll_left_alone()
            engines = _left_alone()
            if engines:
                self._sleep(engines, version)
                continue
            self.needed.clear()
            # Begun, or left by who waited for it, since the last look.
            if version != self.version or _left_alone():
                self.needed.set()

    def _sleep(self, engines: list[Engine], version: int) -> None:
        word = engines[0].sleep_on() if len(engines) == 1 else None
        if word is None:
            time.sleep(PAUSE)
            return
        try:
            self.asleep_on = word[0]
            if version == self.version and not self.over:
                futex.wait(*word, LOOK)
        finally:
            self.asleep_on = None


_helper = _Helper()


def in_background(engine: Engine) -> None:
    """Go on with what was begun on this group also while the rank does something else."""
    word = engine.sleep_on()
    _helper.need(None if word is None else word[0])


def forget() -> None:
    """In a forked child: what the parent has begun is not its business."""
    global _lock, _helper
    _lock, _helper = threading.Lock(), _Helper()
    _unfinished.clear()
    _waited_for.clear()
