"""pdb on a rank that is a process: the terminal is that of pytest, and a socket is between them."""

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
    """Lets the first rank that fails use the terminal of pytest.

    Args:
        config: of the session.

    Attributes:
        address: where ranks ask for it.
        quits: whether the user has left the debugger with `q`, which ends the session.
        was_used: whether a rank has had it.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._capture: Any = config.pluginmanager.getplugin("capturemanager")
        self._folder = tempfile.mkdtemp(prefix="gradmesh-")  # only this user may enter it
        self.address = os.path.join(self._folder, "pdb")
        self.quits = self.was_used = False
        self._door = socket.socket(socket.AF_UNIX)
        self._door.bind(self.address)
        self._door.listen()
        self._thread = threading.Thread(target=self._serve, name="gradmesh pdb", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Let nobody in any more."""
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
        """Pass on what is typed and what the debugger says, until it ends."""
        if self._capture is not None:
            self._capture.suspend(in_=True)
        try:
            keys = [sys.stdin.fileno()]
            said = b""
            while True:
                ready, _, _ = select.select([rank, *keys], [], [])
                if rank in ready:
                    heard = rank.recv(1 << 16)
                    if not heard:
                        break
                    said = (said + heard)[-1:]
                    sys.stdout.write(heard.replace(_QUITS, b"").decode(errors="replace"))
                    sys.stdout.flush()
                    self.quits = said == _QUITS
                elif typed := os.read(keys[0], 1 << 16):
                    rank.sendall(typed)
                else:
                    keys = []
                    rank.shutdown(socket.SHUT_WR)
        finally:
            if self._capture is not None:
                self._capture.resume()


_QUITS = b"\x04"
"""Said by the debugger that was left with `q`."""


def debug(address: str, error: BaseException, heading: str) -> None:
    """Debug an error on this rank, a process, unless another rank was first.

    Args:
        address: of pytest's terminal.
        error: with its traceback.
        heading: what is said first.
    """
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as terminal:
        terminal.connect(address)
        if terminal.recv(1) != b"y":
            return
        with terminal.makefile("r") as typed, terminal.makefile("w") as said:
            said.write(heading)
            debugger = pdb.Pdb(stdin=typed, stdout=said)
            debugger.reset()
            debugger.interaction(None, error.__traceback__)
            if debugger.quitting:
                said.write(_QUITS.decode())
