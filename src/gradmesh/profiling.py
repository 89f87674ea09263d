"""Names in a profile: while a profiler is on, each collective is one range, forward and backward.

A range reads ``gradmesh::all_gather axis=tp bytes=1024``. Bytes are those of the tensor that this rank hands in, in the
dtype that travels. What runs inside a backward pass ends in ``backward``: an adjoint, by its own verb, or the
recomputation of a checkpoint. Inside a compiled program there are no ranges, since the compiler names what it runs.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from gradmesh._torch import in_backward, named_range
from gradmesh.axis import Axis

__all__ = ["collective"]


def collective(verb: str, axis: Axis, x: Tensor, travels: torch.dtype | None) -> AbstractContextManager[Any]:
    """A range for one collective on this rank's tensor.

    Args:
        verb: the op's name.
        axis: the ranks it runs over.
        x: the operand.
        travels: the dtype that it is sent in; None: its own.
    """
    count = x.numel() * (travels or x.dtype).itemsize
    where = " backward" if in_backward() else ""
    return named_range(f"gradmesh::{verb} axis={axis.name} bytes={count}{where}")
