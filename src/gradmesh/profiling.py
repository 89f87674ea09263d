"""Names in a profile: while a profiler is on, each collective is one range, forward and backward.

A range reads ``gradmesh::all_gather axis=tp bytes=1024``. Bytes are those of the tensor that this rank hands in, in the
dtype that travels. What runs inside a backward pass ends in ``backward``: an adjoint, by its own verb, or the
recomputation of a checkpoint. Inside a compiled program there are no ranges, since the compiler names what it runs.

The thread that makes a call may not be the rank's own. So that a profile of several ranks in one process can be told
apart, each range notes whose thread it was made on.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradmesh._torch import in_backward, named_range
from gradmesh.axis import Axis

__all__ = ["SEEN", "collective", "own_rank"]

SEEN: dict[int, int] = {}
"""The rank of each thread on which a collective was profiled, by the number that the system gives the thread."""


def own_rank() -> int:
    """The calling thread's rank in the world; 0 where there is none."""
    return dist.get_rank() if dist.is_initialized() else 0


def collective(
    verb: str, axis: Axis, x: Tensor, travels: torch.dtype | None, *, backward: bool = False
) -> AbstractContextManager[Any]:
    """A range for one collective on this rank's tensor.

    Args:
        verb: the op's name.
        axis: the ranks it runs over.
        x: the operand.
        travels: the dtype that it is sent in; None: its own.
        backward: whether it is the backward of a call, made by whichever thread.
    """
    SEEN[threading.get_native_id()] = own_rank()
    count = x.numel() * (travels or x.dtype).itemsize
    where = " backward" if backward or in_backward() else ""
    return named_range(f"gradmesh::{verb} axis={axis.name} bytes={count}{where}")
