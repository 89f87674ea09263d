"""Transport middleware: context managers that wrap every transport of a rank (delay injection, recording).

Costs one empty-tuple check per call, and another per wait, when unused.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from gradmesh.state import rank_state
from gradmesh.transport.base import Transport

__all__ = ["MIDDLEWARE", "WaitObserver", "Wrap", "install_middleware", "observe_waits"]

Wrap = Callable[[Transport], Transport]
"""Wraps a transport."""

WaitObserver = Callable[[Any, float, float], None]
"""Called after a wait with the `gradmesh.transport.comm_thread.WorkItem` and the start and end time of the wait."""


class _Middleware:
    """The installed wrappers, innermost first, and the wait observers of all ranks of the process.

    The tuples are replaced, never mutated, because other threads iterate over them.
    """

    __slots__ = ("lock", "wait_observers", "wraps")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.wraps: tuple[Wrap, ...] = ()
        self.wait_observers: tuple[WaitObserver, ...] = ()


MIDDLEWARE = _Middleware()


@contextlib.contextmanager
def install_middleware(wrap: Wrap, *, innermost: bool = False) -> Iterator[None]:
    """Wrap every transport that the calling rank uses in the block, in any thread.

    Args:
        wrap: called with each transport before its call, with the call check still attached.
        innermost: wrap inside the installed middleware instead of outside.
    """
    mine = rank_state()

    def of_this_rank(transport: Transport) -> Transport:
        return wrap(transport) if rank_state() is mine else transport

    with MIDDLEWARE.lock:
        MIDDLEWARE.wraps = (
            (of_this_rank, *MIDDLEWARE.wraps) if innermost else (*MIDDLEWARE.wraps, of_this_rank)
        )
    try:
        yield
    finally:
        with MIDDLEWARE.lock:
            MIDDLEWARE.wraps = tuple(other for other in MIDDLEWARE.wraps if other is not of_this_rank)


@contextlib.contextmanager
def observe_waits(waited: WaitObserver) -> Iterator[None]:
    """Call `waited` after each wait for an async call, of any rank of the process, on the waiting thread."""
    with MIDDLEWARE.lock:
        MIDDLEWARE.wait_observers = (*MIDDLEWARE.wait_observers, waited)
    try:
        yield
    finally:
        with MIDDLEWARE.lock:
            MIDDLEWARE.wait_observers = tuple(
                other for other in MIDDLEWARE.wait_observers if other is not waited
            )
