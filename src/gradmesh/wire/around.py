"""What stands around the carriers of a rank for a while: a wire that is slower, somebody who watches.

Where nothing does, it costs a call one look at an empty tuple, and a wait for one that was begun another.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from gradmesh.state import rank_state
from gradmesh.wire.carrier import Carrier

__all__ = ["AROUND", "Waited", "Wrap", "surrounded", "waits_seen"]

Wrap = Callable[[Carrier], Carrier]
"""Makes of a carrier the one that is used instead, which moves what it has to move by the first one."""

Waited = Callable[[Any, float, float], None]
"""Is told of a `gradmesh.wire.courier.Job` that was waited for, and when the wait began and ended."""


class _Around:
    """What stands around the carriers of all ranks of the process, from the inside to the outside, and who is told.

    The tuples are replaced and never changed, as other threads go through them.
    """

    __slots__ = ("lock", "told", "wraps")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.wraps: tuple[Wrap, ...] = ()
        self.told: tuple[Waited, ...] = ()


AROUND = _Around()


@contextlib.contextmanager
def surrounded(wrap: Wrap, *, innermost: bool = False) -> Iterator[None]:
    """Put something around every carrier that the calling rank uses in the block, in whichever thread.

    Args:
        wrap: is handed each carrier when a call is about to be made, with the call's claim still in it.
        innermost: whether it stands inside of what is there already; else outside.
    """
    mine = rank_state()

    def of_this_rank(carrier: Carrier) -> Carrier:
        return wrap(carrier) if rank_state() is mine else carrier

    with AROUND.lock:
        AROUND.wraps = (of_this_rank, *AROUND.wraps) if innermost else (*AROUND.wraps, of_this_rank)
    try:
        yield
    finally:
        with AROUND.lock:
            AROUND.wraps = tuple(other for other in AROUND.wraps if other is not of_this_rank)


@contextlib.contextmanager
def waits_seen(waited: Waited) -> Iterator[None]:
    """Have somebody told of each wait for a call that was begun, of whatever rank of the process, on its own thread."""
    with AROUND.lock:
        AROUND.told = (*AROUND.told, waited)
    try:
        yield
    finally:
        with AROUND.lock:
            AROUND.told = tuple(other for other in AROUND.told if other is not waited)
