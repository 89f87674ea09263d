"""What stands around the carriers of a rank for a while: a wire that is slower, somebody who watches.

Where nothing does, it costs a call one look at an empty tuple.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from gradmesh.state import rank_state
from gradmesh.wire.carrier import Carrier

__all__ = ["AROUND", "Wrap", "surrounded"]

Wrap = Callable[[Carrier], Carrier]
"""Makes of a carrier the one that is used instead, which moves what it has to move by the first one."""


class _Around:
    """The wraps of all ranks of the process, from the inside to the outside.

    The tuple is replaced and never changed, as other threads go through it.
    """

    __slots__ = ("lock", "wraps")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.wraps: tuple[Wrap, ...] = ()


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
