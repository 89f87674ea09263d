"""Output of process ranks, read from pipes and shown by the launching process.

A pipe is the stdout or stderr of a rank, so that output of C code and of child processes is included. There is no
reader thread: the thread that waits for the ranks reads the pipes and writes to `sys.stdout` and `sys.stderr`. So the
output goes to the notebook cell that runs, and `contextlib.redirect_stdout` and pytest capture it. A rank that prints
more than a pipe holds blocks until it is read.
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
"""Bytes per read: the default capacity of a pipe on Linux."""
_LARGEST_PIPE = 1 << 20
"""The maximum capacity of a pipe on Linux for unprivileged users."""


@dataclasses.dataclass
class _Pipe:
    file: IO[bytes]
    screen: Screen
    prefix: str
    splitter: LineSplitter | None  # None: pass text on unchanged
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
        """Read the output of a process, which was started with two pipes."""
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
            # At most a full pipe, since a thread or child process may never stop printing.
            for _ in range(_LARGEST_PIPE // _CHUNK):
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
