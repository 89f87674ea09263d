"""What a transport does with memory: how it is sent, laid out, and recycled for large results on the CPU.

For a fresh result, page faults may take almost half of a call from 1 MiB on, and three quarters from 64 MiB on
(docs/reports/shm.md). So blocks of freed results are used again, in huge pages where available. The system may reclaim
the pages of an idle block of 16 MiB or more if memory runs short.

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

from gradmesh._util.environment import RECYCLE
from gradmesh.ops.transport import flattened

CARRIED = frozenset(
    {
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.complex128,
    }
)
"""The dtypes that every backend of torch.distributed can add. Any other (int16, float8, ...) is sent as bytes."""

_PAIRS = {torch.complex64: torch.float32, torch.complex128: torch.float64}


def sent_as(dtype: torch.dtype) -> torch.dtype:
    """The dtype that a backend is given: complex numbers, which NCCL lacks, are pairs of real ones, others bytes."""
    return _PAIRS.get(dtype, dtype) if dtype in CARRIED else torch.uint8


def flat_memory(x: Tensor) -> Tensor:
    """The memory of a dense tensor as a flat buffer that every backend can send."""
    one = flattened(x)
    kind = sent_as(one.dtype)
    return one if kind is one.dtype else one.view(kind)


def with_memory(flat: Tensor) -> Tensor:
    """The same tensor; a copy if it has no storage, as autograd's ZeroTensor in forward over reverse, or a wrapper."""
    if flat.data_ptr() or not flat.numel():
        return flat
    return torch.empty(flat.shape, dtype=flat.dtype, device=flat.device).copy_(flat)


def laid_out_as(x: Tensor, y: Tensor) -> Tensor:
    """The result in the operand's memory format, such as channels_last.

    Sizes may differ along the outermost dimension in memory, as in a gather along it. Otherwise, and where the operand
    has gaps or overlaps, the result is returned unchanged.
    """
    strides = _kept_strides(x.shape, x.stride(), y.shape)
    return (
        y
        if strides is None
        else torch.empty_strided(y.shape, strides, dtype=y.dtype, device=y.device).copy_(y)
    )


def _kept_strides(
    shape: Sequence[int], strides: Sequence[int], wanted: Sequence[int]
) -> Sequence[int] | None:
    """The strides for the wanted shape in the memory format of another tensor; None where that is not possible."""
    if len(shape) != len(wanted) or 0 in strides:
        return None
    changed = [dim for dim, size in enumerate(shape) if size != wanted[dim]]
    expected, inner = 1, [dim for dim, size in enumerate(shape) if size != 1 and dim not in changed]
    for dim in sorted(inner, key=lambda dim: strides[dim]):
        if strides[dim] != expected:
            return None
        expected *= shape[dim]
    if not changed:
        return strides
    outer = changed[0]
    if len(changed) > 1 or (shape[outer] != 1 and strides[outer] != expected):
        return None
    return [*strides[:outer], expected, *strides[outer + 1 :]]


SMALLEST = 1 << 20
"""Bytes from which a result is recycled: the C library may return such memory to the system each time it is freed."""
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
        whole = size + -size % (_HUGE_PAGE if size >= _HUGE_PAGE else 1 << 16)
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

    >>> empty((2, 3), torch.float32, torch.device("cpu")).shape
    torch.Size([2, 3])
    """
    size = math.prod(shape) * dtype.itemsize
    if size < SMALLEST or device.type != "cpu" or not _ANONYMOUS or size > RECYCLE.value():
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.frombuffer(_pool.take(size), dtype=dtype, count=size // dtype.itemsize).view(shape)
