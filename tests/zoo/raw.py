"""Collectives as hand-written Functions call them: on torch.distributed, and out of autograd's sight."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = [
    "alike",
    "exchanged",
    "gathered",
    "operand",
    "own",
    "rank",
    "reduce_scattered",
    "summed",
    "world",
    "world_group",
]


def rank() -> int:
    return dist.get_rank()


def world() -> int:
    return dist.get_world_size()


def world_group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    if group is None:
        raise RuntimeError("there is no process group")
    return group


def operand(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """A random tensor, a different one on each rank."""
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(1 + rank()))


def alike(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """A random tensor, the same on every rank."""
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(99))


@torch.no_grad()
def gathered(x: Tensor, dim: int = 0) -> Tensor:
    """All ranks' tensors, concatenated."""
    parts = [torch.empty(x.shape, dtype=x.dtype) for _ in range(world())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts, dim)


@torch.no_grad()
def summed(x: Tensor) -> Tensor:
    """The sum over the ranks, in fresh memory."""
    total = x.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total)
    return total


@torch.no_grad()
def own(x: Tensor, dim: int = 0) -> Tensor:
    """This rank's equal part, in fresh memory."""
    size = x.shape[dim] // world()
    return x.narrow(dim, rank() * size, size).clone(memory_format=torch.contiguous_format)


@torch.no_grad()
def reduce_scattered(x: Tensor, dim: int = 0) -> Tensor:
    """This rank's equal part of the sum over the ranks."""
    return own(summed(x), dim)


@torch.no_grad()
def exchanged(x: Tensor) -> Tensor:
    """Equal parts of dim 0 sent to each rank: all_to_all."""
    out = torch.empty(x.shape, dtype=x.dtype)
    dist.all_to_all_single(out, x.contiguous())
    return out
