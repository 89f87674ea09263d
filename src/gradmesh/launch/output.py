"""Output of ranks: merged into one stream, in which each line is complete and starts with its rank.

Text is buffered until its line is complete. A carriage return also completes a line, because progress bars start or
end each update with one. The update is written with its carriage return and overwritten by the next text, as on a
terminal with a single writer.
"""

from __future__ import annotations

import codecs
import contextlib
import dataclasses
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import IO, Any, TextIO

# A return at the end of the text may be the first half of "\r\n".
_END = re.compile(r"(\r\n|\n|\r(?!\Z))")


def prefixes(size: int, prefix: bool | None) -> list[str] | None:
    """The line prefix of each rank, or None to pass the output of a single rank on unchanged.

    >>> prefixes(2, None), prefixes(2, False), prefixes(1, None)
    (['[rank 0] ', '[rank 1] '], ['', ''], None)
    """
    if size == 1 and not prefix:
        return None
    return ["" if prefix is False else f"[rank {rank}] " for rank in range(size)]


class LineSplitter:
    r"""Splits text that arrives in pieces into lines, each with its end-of-line character.

    >>> lines = LineSplitter()
    >>> lines.feed("one\ntw"), lines.feed("o\r"), lines.feed("three\n"), lines.feed("four")
    ([('one', '\n')], [], [('two', '\r'), ('three', '\n')], [])
    >>> lines.rest()
    [('four', '\n')]
    """

    def __init__(self) -> None:
        self._held: list[str] = []  # joined once, since a long line may arrive in many pieces

    def feed(self, text: str) -> list[tuple[str, str]]:
        """Add a piece of text, and return the lines that it completes."""
        if self._held and self._held[-1].endswith("\r"):
            text = self._held.pop() + text
        parts = _END.split(text)
        if len(parts) == 1:
            if text:
                self._held.append(text)
            return []
        parts[0] = "".join(self._held) + parts[0]
        self._held = [parts[-1]] if parts[-1] else []
        return [
            (line, "\r" if end == "\r" else "\n") for line, end in zip(parts[:-1:2], parts[1::2], strict=True)
        ]

    def rest(self) -> list[tuple[str, str]]:
        """Return the incomplete line, if any, and clear it."""
        text = "".join(self._held)
        self._held = []
        if text.endswith("\r"):
            return [(text[:-1], "\r")]
        return [(text, "\n")] if text else []


class Screen:
    """An output stream of this process that shows lines of ranks; looked up at each write, as it may be replaced."""

    def __init__(self, stream: Callable[[], TextIO | None]) -> None:
        self._stream = stream
        self._covered = 0  # the length of the text to overwrite after a carriage return

    def show(self, prefix: str, lines: Iterable[tuple[str, str]]) -> None:
        """Write lines of one rank with a single write."""
        self.write("".join(self._shown(prefix, line, end) for line, end in lines))

    def finish(self) -> None:
        """Start a new line if the current one shows a progress bar."""
        if self._covered:
            self._covered = 0
            self.write("\n")

    def write(self, text: str) -> None:
        """Write text unchanged, with escapes for characters that the stream cannot encode."""
        stream = self._stream()
        if stream is None or not text:
            return
        try:
            stream.write(text)
        except UnicodeEncodeError as error:
            stream.write(text.encode(error.encoding, "backslashreplace").decode(error.encoding))

    def flush(self) -> None:
        """Flush the stream."""
        stream = self._stream()
        if stream is not None:
            stream.flush()

    def _shown(self, prefix: str, line: str, end: str) -> str:
        if end == "\r" and not line:
            return ""  # most progress bars start with a carriage return
        clears = end == "\r" and line.isspace()
        text = "" if clears else prefix + line if line else prefix.rstrip()
        covered, self._covered = self._covered, len(text) if end == "\r" else 0
        if clears and not covered:
            return ""
        return text.ljust(covered) + end


_CHUNK = 1 << 16
"""Bytes per read: the default capacity of a pipe on Linux."""


@dataclasses.dataclass
class _Pipe:
    file: IO[bytes]
    screen: Screen
    prefix: str
    splitter: LineSplitter | None  # None: pass text on unchanged
    decoder: codecs.IncrementalDecoder


class OutputPipes:
    """The standard output and standard error of the process ranks of one world.

    A pipe is the stdout or stderr of a rank, so that output of C code and of child processes is included. There is no
    reader thread: the thread that waits for the ranks reads the pipes and writes to `sys.stdout` and `sys.stderr`. So
    the output goes to the notebook cell that runs, and `contextlib.redirect_stdout` and pytest capture it. A rank that
    prints more than a pipe holds blocks until it is read.
    """

    def __init__(self, size: int, prefix: bool | None) -> None:
        self._prefixes = prefixes(size, prefix)
        self._screens = {"stdout": Screen(lambda: sys.stdout), "stderr": Screen(lambda: sys.stderr)}
        self._pipes: dict[int, _Pipe] = {}

    def add(self, rank: int, *pipes: int) -> None:
        """Read a rank's standard output and standard error from these file descriptors."""
        for pipe, screen in zip(pipes, self._screens.values(), strict=True):
            file = os.fdopen(pipe, "rb", buffering=0)
            os.set_blocking(file.fileno(), False)
            self._pipes[file.fileno()] = _Pipe(
                file,
                screen,
                prefix="" if self._prefixes is None else self._prefixes[rank],
                splitter=None if self._prefixes is None else LineSplitter(),
                decoder=codecs.getincrementaldecoder("utf-8")("backslashreplace"),
            )

    @property
    def open(self) -> list[int]:
        """The file descriptors to wait for; `show` removes closed ones."""
        return list(self._pipes)

    def show(self, ready: Iterable[Any]) -> None:
        """Show the available output of those ready objects that are pipes."""
        ready = [fd for fd in ready if isinstance(fd, int) and fd in self._pipes]
        for fd in ready:
            self._read(fd)
        if ready:
            self._flush()

    def drain(self) -> None:
        """Show all output so far, including incomplete lines."""
        for fd in self.open:
            # At most a full pipe, of 1 MiB on Linux, since a thread or child process may never stop printing.
            for _ in range((1 << 20) // _CHUNK):
                if not self._read(fd):
                    break
        for pipe in self._pipes.values():
            self._show_rest(pipe)
        for screen in self._screens.values():
            screen.finish()
        self._flush()

    def close(self) -> None:
        """Close the pipes; discards output that was not shown."""
        for pipe in self._pipes.values():
            pipe.file.close()
        self._pipes = {}

    def _read(self, fd: int) -> bool:
        """Read once and show the text; returns whether there was any."""
        pipe = self._pipes[fd]
        data = pipe.file.read(_CHUNK)
        if data is None:  # nothing available
            return False
        text = pipe.decoder.decode(data, final=not data)
        if pipe.splitter is None:
            pipe.screen.write(text)
        else:
            pipe.screen.show(pipe.prefix, pipe.splitter.feed(text))
        if not data:  # all writers have closed the pipe
            self._show_rest(pipe)
            pipe.file.close()
            del self._pipes[fd]
        return bool(data)

    @staticmethod
    def _show_rest(pipe: _Pipe) -> None:
        if pipe.splitter is not None:
            pipe.screen.show(pipe.prefix, pipe.splitter.rest())

    def _flush(self) -> None:
        for screen in self._screens.values():
            screen.flush()


# .prefix: the prefix of a rank's thread; .streams: the streams it has written to
_of_thread = threading.local()
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
    """Wraps a text stream, and buffers the text of a rank's thread until its line is complete.

    It passes on what other threads write immediately, and delegates all other attributes (`fileno`, `isatty`,
    `encoding`, `buffer`).
    """

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.users = 0
        self._screen = Screen(lambda: stream)
        self._held: dict[int, tuple[str, LineSplitter]] = {}
        # Reentrant: a destructor that prints may run while its thread holds the lock.
        self._lock = threading.RLock()

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
    """Replace `sys.stdout` and `sys.stderr` until the last user exits the block.

    A stream that was obtained before, such as that of a logging handler, is not replaced: its lines have no prefix.
    """
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
