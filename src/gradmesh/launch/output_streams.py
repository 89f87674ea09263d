"""What ranks that are threads print: `sys.stdout` and `sys.stderr` tell the ranks' lines apart while they run.

The stream that stands in their place passes on at once what other threads write, and has every other attribute
of the stream behind it (`fileno`, `isatty`, `encoding`, `buffer`). A stream that was taken before the ranks
started, such as that of a logging handler, is not replaced: what is written there carries no rank.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import Any, TextIO

from gradmesh.launch.log_prefix import LineSplitter, Screen

__all__ = ["finish_lines", "mark_thread", "ranks_write_lines", "thread_mark"]

_of_thread = threading.local()  # .mark, in the threads of ranks; .streams, to which such a thread has written
_replacing = threading.Lock()


def mark_thread(mark: str | None) -> None:
    """Let the lines of the calling thread start with this text; None: what it writes passes as it is."""
    _of_thread.mark = mark
    _of_thread.streams = set()


def thread_mark() -> str | None:
    """What the lines of the calling thread start with, or None in a thread that has no such mark."""
    return getattr(_of_thread, "mark", None)


def finish_lines() -> None:
    """Show what the calling thread has written since its last whole line."""
    for stream in _of_thread.streams:
        stream.finish_line(threading.get_ident())
    _of_thread.streams.clear()


class RankStream:
    """Stands for a text stream, and holds back what a marked thread writes until its line is complete."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.users = 0
        self._screen = Screen(lambda: stream)
        self._held: dict[int, tuple[str, LineSplitter]] = {}
        self._lock = threading.RLock()  # a destructor that prints may run while its thread has the lock

    def write(self, text: str) -> int:
        """Write text, and return its length."""
        mark = thread_mark()
        if mark is None or not isinstance(text, str):
            return self.stream.write(text)
        with self._lock:
            _of_thread.streams.add(self)
            _, splitter = self._held.setdefault(threading.get_ident(), (mark, LineSplitter()))
            self._screen.show(mark, splitter.feed(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write each of the texts."""
        for line in lines:
            self.write(line)

    def finish_line(self, thread: int) -> None:
        """Show what that thread has written since its last whole line."""
        with self._lock:
            if thread in self._held:
                mark, splitter = self._held.pop(thread)
                self._screen.show(mark, splitter.rest())

    def finish(self) -> None:
        """Show what any thread has written since its last whole line."""
        with self._lock:
            for thread in list(self._held):
                self.finish_line(thread)
            self._screen.finish()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextlib.contextmanager
def ranks_write_lines() -> Iterator[None]:
    """Replace `sys.stdout` and `sys.stderr` until the last who asked for it is done with them."""
    used: list[tuple[str, RankStream]] = []
    with _replacing:
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if stream is None:  # as in a process without a console
                continue
            if not isinstance(stream, RankStream):
                stream = RankStream(stream)
                setattr(sys, name, stream)
            stream.users += 1
            used.append((name, stream))
    try:
        yield
    finally:
        with _replacing:
            for name, stream in used:
                stream.users -= 1
                # Somebody else may have replaced it meanwhile, whose stream it then is.
                if stream.users == 0 and getattr(sys, name) is stream:
                    setattr(sys, name, stream.stream)
        for _, stream in used:
            if stream.users == 0:
                stream.finish()
