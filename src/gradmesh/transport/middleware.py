"""Transport middleware: context managers that wrap every transport of a rank (delay injection, recording).

Costs one empty-tuple check per call, and another per wait, when unused.

Profiler ranges: while a profiler is on, each collective is one range, forward and backward.
A range is named ``gradmesh::all_gather axis=tp bytes=1024``, with the bytes of this rank's operand in the dtype that is
sent. The name ends in ``backward`` inside a backward pass (an adjoint, by its verb, or the recomputation of a
checkpoint). Compiled programs have no ranges.

Calls may run on helper threads, so each range records the rank of its thread.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradmesh._torch import in_backward, named_range
from gradmesh.ops.transport import Transport
from gradmesh.runtime.mesh import Axis
from gradmesh.runtime.state import rank_state

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


SEEN: dict[int, int] = {}
"""The rank of each thread on which a collective was profiled, by native thread id."""


def own_rank() -> int:
    """The calling thread's global rank; 0 before `init`."""
    return dist.get_rank() if dist.is_initialized() else 0


def collective(
    verb: str, axis: Axis, x: Tensor, travels: torch.dtype | None, *, backward: bool = False
) -> AbstractContextManager[Any]:
    """A range for one collective on this rank's tensor.

    Args:
        verb: the op's name.
        axis: the ranks it runs over.
        x: the operand.
        travels: the dtype that is sent; None: that of the operand.
        backward: whether it is the backward of a call.
    """
    SEEN[threading.get_native_id()] = own_rank()
    count = x.numel() * (travels or x.dtype).itemsize
    where = " backward" if backward or in_backward() else ""
    return named_range(f"gradmesh::{verb} axis={axis.name} bytes={count}{where}")
