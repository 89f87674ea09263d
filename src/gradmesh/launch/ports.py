"""A free TCP port of this host."""

from __future__ import annotations

import socket

__all__ = ["free_port"]


def free_port() -> int:
    """A currently unused port of the loopback interface."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port
