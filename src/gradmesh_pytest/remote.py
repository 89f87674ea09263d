"""pdb on a process rank: connects the rank's debugger with pytest's terminal through a socket."""

from __future__ import annotations

import contextlib
import os
import pdb
import select
import shutil
import socket
import sys
import tempfile
import threading
from typing import Any

import pytest

__all__ = ["Terminal", "debug"]


class Terminal:
    """Gives the first failed rank access to pytest's terminal.

    Args:
        config: the session's config.

    Attributes:
        address: the address of the socket.
        quits: whether the user has left the debugger with `q`, which ends the session.
        was_used: whether a rank has used the terminal.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._capture: Any = config.pluginmanager.getplugin("capturemanager")
        self._folder = tempfile.mkdtemp(prefix="gradmesh-")  # only this user can access it
        self.address = os.path.join(self._folder, "pdb")
        self.quits = self.was_used = False
        self._door = socket.socket(socket.AF_UNIX)
        self._door.bind(self.address)
        self._door.listen()
        self._thread = threading.Thread(target=self._serve, name="gradmesh pdb", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close the socket."""
        with contextlib.suppress(OSError):
            self._door.shutdown(socket.SHUT_RDWR)
        self._door.close()
        self._thread.join()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _serve(self) -> None:
        while True:
            try:
                rank, _ = self._door.accept()
            except OSError:  # closed
                return
            with rank, contextlib.suppress(OSError):
                if not self.was_used:
                    self.was_used = True
                    rank.sendall(b"y")
                    self._connect(rank)

    def _connect(self, rank: socket.socket) -> None:
        """Forward input and output of the debugger until it ends."""
        if self._capture is not None:
            self._capture.suspend(in_=True)
        try:
            keys = [sys.stdin.fileno()]
            last = b""
            while True:
                ready, _, _ = select.select([rank, *keys], [], [])
                if rank in ready:
                    received = rank.recv(1 << 16)
                    if not received:
                        break
                    last = (last + received)[-1:]
                    sys.stdout.write(received.replace(_QUITS, b"").decode(errors="replace"))
                    sys.stdout.flush()
                    self.quits = last == _QUITS
                elif typed := os.read(keys[0], 1 << 16):
                    rank.sendall(typed)
                else:
                    keys = []
                    rank.shutdown(socket.SHUT_WR)
        finally:
            if self._capture is not None:
                self._capture.resume()


_QUITS = b"\x04"
"""Sent by the debugger after `q`."""


def debug(address: str, error: BaseException, heading: str) -> None:
    """Debug an error on this process rank, unless another rank uses the terminal.

    Args:
        address: the address of pytest's terminal.
        error: the error with its traceback.
        heading: text to print first.
    """
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as terminal:
        terminal.connect(address)
        if terminal.recv(1) != b"y":
            return
        with terminal.makefile("r") as stdin, terminal.makefile("w") as stdout:
            stdout.write(heading)
            debugger = pdb.Pdb(stdin=stdin, stdout=stdout)
            debugger.reset()
            debugger.interaction(None, error.__traceback__)
            if debugger.quitting:
                stdout.write(_QUITS.decode())
