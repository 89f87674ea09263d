"""Profiler ranges: while a profiler is on, each collective is one range, forward and backward.

A range is named ``gradmesh::all_gather axis=tp bytes=1024``, with the bytes of this rank's operand in the dtype that is
sent. The name ends in ``backward`` inside a backward pass (an adjoint, by its verb, or the recomputation of a
checkpoint). Compiled programs have no ranges.

Calls may run on helper threads, so each range records the rank of its thread.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradmesh._torch import in_backward, named_range
from gradmesh.runtime.mesh import Axis

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
