"""What ranks that are processes print, read from pipes and shown by the process that launched them.

A pipe is the standard output or the standard error of a rank, so that what C code and the rank's own child
processes print arrives too. There is no reading thread: whoever waits for the ranks reads meanwhile and writes to
its own `sys.stdout` and `sys.stderr`. So the output of a notebook goes to the cell that runs, and
`contextlib.redirect_stdout` and pytest see it. A rank that prints more than a pipe holds waits until it is read.
"""

from __future__ import annotations

import codecs
import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterable
from typing import IO, Any

from gradmesh.launch.log_prefix import LineSplitter, Screen, prefixes

__all__ = ["OutputPipes"]

_CHUNK = 1 << 16
"""Bytes read at once: what a pipe holds on Linux by default."""
_LARGEST_PIPE = 1 << 20
"""What a pipe may hold on Linux without privileges."""


@dataclasses.dataclass
class _Pipe:
    file: IO[bytes]
    screen: Screen
    prefix: str
    splitter: LineSplitter | None  # None: the text passes as it is
    decoder: codecs.IncrementalDecoder


class OutputPipes:
    """The standard output and standard error of the ranks of one world.

    Args:
        size: the number of ranks.
        prefix: as for `gradmesh.launch`.
    """

    def __init__(self, size: int, prefix: bool | None) -> None:
        self._prefixes = prefixes(size, prefix)
        self._screens = {"stdout": Screen(lambda: sys.stdout), "stderr": Screen(lambda: sys.stderr)}
        self._pipes: dict[int, _Pipe] = {}

    def add(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        """Read from now on what that process prints; it was started with two pipes."""
        for name, screen in self._screens.items():
            file: IO[bytes] = getattr(process, name)
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
        """The file descriptors to wait for; `show` drops those that ended."""
        return list(self._pipes)

    def show(self, ready: Iterable[Any]) -> None:
        """Show what can be read from those of the ready objects that are file descriptors of pipes."""
        ready = [fd for fd in ready if isinstance(fd, int) and fd in self._pipes]
        for fd in ready:
            self._read(fd)
        if ready:
            self._flush()

    def drain(self) -> None:
        """Show all that was printed until now, also a line without an end."""
        for fd in self.open:
            # No more than a full pipe: a rank's own thread or process may never stop printing.
            for _ in range(_LARGEST_PIPE // _CHUNK):
                if not self._read(fd):
                    break
        for pipe in self._pipes.values():
            self._show_rest(pipe)
        for screen in self._screens.values():
            screen.finish()
        self._flush()

    def close(self) -> None:
        """Close the pipes; what was not shown is lost."""
        for pipe in self._pipes.values():
            pipe.file.close()
        self._pipes = {}

    def _read(self, fd: int) -> bool:
        """Show what one read gives, and whether it gave anything."""
        pipe = self._pipes[fd]
        data = pipe.file.read(_CHUNK)
        if data is None:  # nothing there now
            return False
        text = pipe.decoder.decode(data, final=not data)
        if pipe.splitter is None:
            pipe.screen.write(text)
        else:
            pipe.screen.show(pipe.prefix, pipe.splitter.feed(text))
        if not data:  # every process that had the other end is gone
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
