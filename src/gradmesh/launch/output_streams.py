"""Output of thread ranks: replaces `sys.stdout` and `sys.stderr` while they run, to prefix lines with the rank.

The replacement passes on what other threads write immediately, and delegates all other attributes (`fileno`, `isatty`,
`encoding`, `buffer`). A stream that was obtained before the ranks started, such as that of a logging handler, is not
replaced: its lines have no prefix.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import Any, TextIO

from gradmesh.launch.log_prefix import LineSplitter, Screen

__all__ = ["flush_incomplete_lines", "prefixed_streams", "set_prefix", "thread_prefix"]

_of_thread = (
    threading.local()
)  # .mark: the prefix of a rank's thread; .streams: the streams it has written to
_replacing = threading.Lock()


def set_prefix(prefix: str | None) -> None:
    """Set the line prefix of the calling thread; None: pass its output on unchanged."""
    _of_thread.prefix = prefix
    _of_thread.streams = set()


def thread_prefix() -> str | None:
    """The line prefix of the calling thread, or None."""
    return getattr(_of_thread, "prefix", None)


def flush_incomplete_lines() -> None:
    """Show the incomplete last lines of the calling thread."""
    for stream in _of_thread.streams:
        stream.finish_line(threading.get_ident())
    _of_thread.streams.clear()


class RankStream:
    """Wraps a text stream, and buffers the text of a rank's thread until its line is complete."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.users = 0
        self._screen = Screen(lambda: stream)
        self._held: dict[int, tuple[str, LineSplitter]] = {}
        self._lock = (
            threading.RLock()
        )  # reentrant: a destructor that prints may run while its thread holds the lock

    def write(self, text: str) -> int:
        """Write text, and return its length."""
        prefix = thread_prefix()
        if prefix is None or not isinstance(text, str):
            return self.stream.write(text)
        with self._lock:
            _of_thread.streams.add(self)
            _, splitter = self._held.setdefault(threading.get_ident(), (prefix, LineSplitter()))
            self._screen.show(prefix, splitter.feed(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write each of the texts."""
        for line in lines:
            self.write(line)

    def finish_line(self, thread: int) -> None:
        """Show the incomplete last line of a thread."""
        with self._lock:
            if thread in self._held:
                prefix, splitter = self._held.pop(thread)
                self._screen.show(prefix, splitter.rest())

    def finish(self) -> None:
        """Show the incomplete last line of every thread."""
        with self._lock:
            for thread in list(self._held):
                self.finish_line(thread)
            self._screen.finish()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextlib.contextmanager
def prefixed_streams() -> Iterator[None]:
    """Replace `sys.stdout` and `sys.stderr` until the last user exits the block."""
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
                # Other code may have replaced the stream meanwhile; then leave it.
                if stream.users == 0 and getattr(sys, name) is stream:
                    setattr(sys, name, stream.stream)
        for _, stream in used:
            if stream.users == 0:
                stream.finish()
