"""Tensors as flat buffers and back: what every carrier needs before it sends and after it has received."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

__all__ = ["CARRIED", "assemble", "counts", "dense", "flat_memory", "flattened", "pack", "with_memory"]

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
"""The dtypes that every backend of torch.distributed moves. Any other (int16, float8, ...) travels as bytes."""


def dense(x: Tensor) -> Tensor:
    """`x` with plain strides and no pending conjugation or sign, copied only if need be."""
    return x.resolve_conj().resolve_neg().contiguous()


def flattened(x: Tensor) -> Tensor:
    """A dense tensor in one dimension, over the same memory."""
    return x if x.dim() == 1 else x.view(-1)


def flat_memory(x: Tensor) -> Tensor:
    """The memory of a dense tensor as a flat buffer of a dtype that travels."""
    one = flattened(x)
    return one if one.dtype in CARRIED else one.view(torch.uint8)


def with_memory(flat: Tensor) -> Tensor:
    """The same; zeros with memory for zeros that have none, as autograd makes them in forward over reverse."""
    return flat if flat.data_ptr() or not flat.numel() else flat.clone()


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
        collect: runs a motion into a buffer of a shape, or of one dimension.
        shape: that of any part, its size along `dim` ignored.
        dim: the dimension to join along.
        sizes: each part's size along it.
    """
    lead, tail = tuple(shape[:dim]), tuple(shape[dim + 1 :])
    if dim == 0 or math.prod(lead) == 1:
        return collect((*lead, sum(sizes), *tail))
    parts = collect(None).split(counts(shape, dim, sizes))
    return torch.cat([part.view(*lead, n, *tail) for part, n in zip(parts, sizes, strict=True)], dim)
