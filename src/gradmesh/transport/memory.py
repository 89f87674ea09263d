"""Recycled CPU memory for large results.

For a fresh result of 32 MiB or more, page faults take longer than the transfer (`python tools/fresh_memory.py` measures
it). So blocks of freed results are used again, in huge pages where available. The system may reclaim the pages of an
idle block if memory runs short.

The environment variable GRADMESH_RECYCLE limits the idle memory in MiB; it defaults to 512, and 0 turns recycling off.
The storage of a recycled tensor cannot be resized.
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
"""Smallest block, in bytes, whose idle pages the system may reclaim; for smaller ones that costs a tenth."""
_HUGE_PAGE = 1 << 21
_ANONYMOUS = hasattr(mmap, "MAP_ANONYMOUS")
_MOST = 1.25
"""Largest ratio of a block's size to the requested size."""


class _Pool:
    """The idle blocks, the latest last.

    A block comes back in the thread that frees the tensor, possibly during `take` when garbage is collected. So it
    uses no lock: each change of the list is atomic, and loops run over a copy.
    """

    def __init__(self) -> None:
        self.idle: list[mmap.mmap] = []
        self.lent: dict[int, weakref.ref[memoryview]] = {}

    def take(self, size: int) -> memoryview:
        """A block of that size or a little more."""
        whole = -(-size // _HUGE_PAGE) * _HUGE_PAGE
        block = self._idle_one(whole) or _fresh(whole)
        view = memoryview(block)
        # Only the tensor holds the view, so the view dies with the tensor.
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
    """How many bytes are idle."""
    return _pool.size()


def release() -> None:
    """Release the idle blocks."""
    _pool.idle.clear()


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialised dense tensor; in recycled memory if it is large and on the CPU.

    Args:
        shape: the shape.
        dtype: the dtype.
        device: the device.

    Example:
        >>> empty((2, 3), torch.float32, torch.device("cpu")).shape
        torch.Size([2, 3])
    """
    size = math.prod(shape) * dtype.itemsize
    if size < SMALLEST or device.type != "cpu" or not _ANONYMOUS or size > RECYCLE.value():
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.frombuffer(_pool.take(size), dtype=dtype, count=size // dtype.itemsize).view(shape)
