"""Tensors as flat buffers and back."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

__all__ = [
    "CARRIED",
    "assemble",
    "counts",
    "dense",
    "flat_memory",
    "flattened",
    "laid_out_as",
    "pack",
    "with_memory",
]

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
"""The dtypes that every backend of torch.distributed sends. Any other (int16, float8, ...) is sent as bytes."""


def dense(x: Tensor) -> Tensor:
    """`x` with plain strides and no pending conjugation or sign, copied only if need be."""
    return x.resolve_conj().resolve_neg().contiguous()


def flattened(x: Tensor) -> Tensor:
    """A dense tensor in one dimension, over the same memory."""
    return x if x.dim() == 1 else x.view(-1)


def flat_memory(x: Tensor) -> Tensor:
    """The memory of a dense tensor as a flat buffer of a dtype in `CARRIED`."""
    one = flattened(x)
    return one if one.dtype in CARRIED else one.view(torch.uint8)


def with_memory(flat: Tensor) -> Tensor:
    """The same tensor; a copy if it has no storage, as autograd's ZeroTensor in forward over reverse."""
    return flat if flat.data_ptr() or not flat.numel() else flat.clone()


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
    if len(shape) != len(wanted):
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


def counts(shape: Sequence[int], dim: int, sizes: Sequence[int]) -> list[int]:
    """How many elements each rank's part has, when the parts have these sizes along `dim`."""
    rest = math.prod(shape[:dim]) * math.prod(shape[dim + 1 :])
    return [rest * size for size in sizes]


def pack(x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    """The parts of `x` along `dim`, one after another, as one flat buffer."""
    if dim == 0 or math.prod(x.shape[:dim]) == 1:
        return flattened(dense(x))
    return torch.cat([part.reshape(-1) for part in dense(x).split(list(sizes), dim)])


def assemble(
    collect: Callable[[Sequence[int] | None], Tensor], shape: Sequence[int], dim: int, sizes: Sequence[int]
) -> Tensor:
    """Collect the ranks' parts, joined along `dim`.

    Args:
        collect: runs a primitive into a buffer of the given shape; None: flat.
        shape: that of any part, its size along `dim` ignored.
        dim: the dimension to join along.
        sizes: each part's size along it.
    """
    lead, tail = tuple(shape[:dim]), tuple(shape[dim + 1 :])
    if dim == 0 or math.prod(lead) == 1:
        return collect((*lead, sum(sizes), *tail))
    parts = collect(None).split(counts(shape, dim, sizes))
    return torch.cat([part.view(*lead, n, *tail) for part, n in zip(parts, sizes, strict=True)], dim)
