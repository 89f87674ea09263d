"""The progress engine: advances pending calls while their rank does something else.

While a rank waits for one group, it advances pending calls of its other groups: otherwise two ranks could each wait for
a call that the other has started but not finished. If no thread waits, the progress thread takes over
(`in_background`): it sleeps on the word of the next call, so that it wakes when the other ranks have published, and
periodically to check whether they are alive. It sleeps indefinitely if other threads wait for all pending calls.
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

__all__ = ["LOOK", "busy", "idle", "in_background", "progress", "reset_after_fork", "unfinished", "waiting"]

LOOK = 0.05
"""Seconds between two checks of the other processes."""
PAUSE = 0.002
"""Seconds between two polls if there is no single word to sleep on."""

_lock = threading.Lock()
_unfinished: weakref.WeakSet[Engine] = weakref.WeakSet()
_waited_for: list[Engine] = []


def busy(engine: Engine) -> None:
    """Register a group with pending calls."""
    with _lock:
        _unfinished.add(engine)


def idle(engine: Engine) -> None:
    """Unregister a group without pending calls."""
    with _lock:
        _unfinished.discard(engine)


def unfinished() -> list[Engine]:
    """The groups with pending calls."""
    with _lock:
        return list(_unfinished)


def progress(waiting: Engine | None = None, in_call: bool = False) -> bool:
    """Advance the pending calls of all groups; returns whether there are any besides the awaited one."""
    others = False
    for engine in unfinished():
        mine = engine is waiting
        others |= engine.poll(in_call=mine and in_call, in_message=mine and not in_call)
    return others


@contextlib.contextmanager
def waiting(engine: Engine) -> Iterator[None]:
    """The calling thread waits for this group within the block, and advances its calls."""
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


def _unattended() -> list[Engine]:
    """The groups with pending calls that no thread waits for."""
    with _lock:
        return [engine for engine in _unfinished if engine not in _waited_for]


def _poll_unattended() -> None:
    for engine in _unattended():
        with contextlib.suppress(Exception):  # the waiter of the call gets the error
            engine.poll()


class _Helper:
    """The progress thread; started on first use."""

    def __init__(self) -> None:
        self.needed = threading.Event()
        self.over = False
        self.starting = threading.Lock()
        self.thread = threading.Thread(target=self._run, name="gradmesh shm", daemon=True)
        self.version = 0
        self.asleep_on: int | None = None

    def need(self, asleep_on: int | None = None) -> None:
        """Take over a new pending call, whose word to sleep on is given."""
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
        """Take over again, if the thread has been started."""
        if self.thread.ident is not None:
            self.needed.set()

    def end(self) -> None:
        """Stop at process exit."""
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
            _poll_unattended()
            engines = _unattended()
            if engines:
                self._sleep(engines, version)
                continue
            self.needed.clear()
            # A call may have been started, or abandoned by its waiter, since the last check.
            if version != self.version or _unattended():
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
    """Advance the pending calls of this group in the progress thread."""
    word = engine.sleep_on()
    _helper.need(None if word is None else word[0])


def reset_after_fork() -> None:
    """Reset inherited state after fork."""
    global _lock, _helper
    _lock, _helper = threading.Lock(), _Helper()
    _unfinished.clear()
    _waited_for.clear()
