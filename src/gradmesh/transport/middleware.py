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
"""Makes of a transport the one that is used instead, which moves what it has to move by the first one."""

WaitObserver = Callable[[Any, float, float], None]
"""Is told of a `gradmesh.transport.comm_thread.WorkItem` that was waited for, and when the wait began and ended."""


class _Middleware:
    """What stands around the transports of all ranks of the process, from the inside to the outside, and who is told.

    The tuples are replaced and never changed, as other threads go through them.
    """

    __slots__ = ("lock", "wait_observers", "wraps")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.wraps: tuple[Wrap, ...] = ()
        self.wait_observers: tuple[WaitObserver, ...] = ()


MIDDLEWARE = _Middleware()


@contextlib.contextmanager
def install_middleware(wrap: Wrap, *, innermost: bool = False) -> Iterator[None]:
    """Put something around every transport that the calling rank uses in the block, in whichever thread.

    Args:
        wrap: is handed each transport when a call is about to be made, with the call's claim still in it.
        innermost: whether it stands inside of what is there already; else outside.
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
    """Have somebody told of each wait for a call that was begun, of whatever rank of the process, on its own thread."""
    with MIDDLEWARE.lock:
        MIDDLEWARE.wait_observers = (*MIDDLEWARE.wait_observers, waited)
    try:
        yield
    finally:
        with MIDDLEWARE.lock:
            MIDDLEWARE.wait_observers = tuple(
                other for other in MIDDLEWARE.wait_observers if other is not waited
            )
