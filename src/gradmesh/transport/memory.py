"""Memory for large results on the CPU, which comes back when its tensor dies.

A fresh result of 32 MiB and more is memory that the system has to hand out page by page while it is being written, and
that takes longer than the transfer: `python tools/fresh_memory.py` shows how much. So blocks that were used before are
used again, in huge pages where the system has them. While a block is idle the system may take its pages, if memory
runs short.

GRADMESH_RECYCLE in the environment is how many MiB may be kept idle, 512 if it is not set; 0 turns recycling off. The
storage of a recycled tensor cannot be resized.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import weakref
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from gradmesh.environment import RECYCLE

__all__ = ["SMALLEST", "empty", "idle_bytes", "release"]

SMALLEST = 1 << 22
"""Bytes from which a result is recycled; below, the C library does it faster."""
_RECLAIMABLE = 1 << 24
"""Bytes of a block from which the system may take its pages while it is idle; below, that would cost a tenth."""
_HUGE_PAGE = 1 << 21
_ANONYMOUS = hasattr(mmap, "MAP_ANONYMOUS")
_MOST = 1.25
"""How much larger than asked for a block may be."""


class _Pool:
    """Blocks that are idle, the latest last.

    A block comes back in whichever thread frees the tensor, perhaps in the middle of `take` when garbage is
    collected. So there is no lock; each change of the list is one step, and it is looked through in a copy.
    """

    def __init__(self) -> None:
        self.idle: list[mmap.mmap] = []
        self.lent: dict[int, weakref.ref[memoryview]] = {}

    def take(self, size: int) -> memoryview:
        """A block of that size or a little more."""
        whole = -(-size // _HUGE_PAGE) * _HUGE_PAGE
        block = self._idle_one(whole) or _fresh(whole)
        view = memoryview(block)
        # The tensor holds the view and nothing else does, so that its end is the tensor's.
        ref = weakref.ref(view, partial(self._back, block))
        self.lent[id(ref)] = ref
        return view

    def _idle_one(self, size: int) -> mmap.mmap | None:
        for block in reversed(self.idle[:]):
            if size <= len(block) <= _MOST * size:
                with contextlib.suppress(ValueError):  # another thread took it
                    self.idle.remove(block)
                    return block
        return None

    def _back(self, block: mmap.mmap, ref: weakref.ref[memoryview]) -> None:
        del self.lent[id(ref)]
        if len(block) >= _RECLAIMABLE:
            with contextlib.suppress(OSError, AttributeError):
                block.madvise(mmap.MADV_FREE)
        self.idle.append(block)
        while self.size() > RECYCLE.value():
            with contextlib.suppress(IndexError):
                self.idle.pop(0)

    def size(self) -> int:
        """Bytes that are idle."""
        return sum(map(len, self.idle[:]))


def _fresh(size: int) -> mmap.mmap:
    block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError, AttributeError):  # the system may have no huge pages
        block.madvise(mmap.MADV_HUGEPAGE)
    return block


_pool = _Pool()


def idle_bytes() -> int:
    """How many bytes are kept for later."""
    return _pool.size()


def release() -> None:
    """Give the idle blocks back to the system."""
    _pool.idle.clear()


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A dense tensor with nothing in it; of recycled memory if it is large and on the CPU.

    Args:
        shape: the shape.
        dtype: the dtype.
        device: where it lies.

    Example:
        >>> empty((2, 3), torch.float32, torch.device("cpu")).shape
        torch.Size([2, 3])
    """
    size = math.prod(shape) * dtype.itemsize
    if size < SMALLEST or device.type != "cpu" or not _ANONYMOUS or size > RECYCLE.value():
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.frombuffer(_pool.take(size), dtype=dtype, count=size // dtype.itemsize).view(shape)
