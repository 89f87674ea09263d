"""Random operands for the programs that have a loss, and what they are over the ranks."""

from __future__ import annotations

import torch
from torch import Tensor

import gradmesh as gm
from gradmesh.verify import Input

__all__ = ["common", "complex_normal", "invariant", "normal", "replicated", "weighted"]


def normal(rank: int, *shape: int, seed: int = 0) -> Tensor:
    """A random tensor, a different one on each rank."""
    return torch.randn(
        shape, dtype=torch.float64, generator=torch.Generator().manual_seed(100 * seed + rank + 1)
    )


def complex_normal(rank: int, *shape: int, seed: int = 0) -> Tensor:
    """A random complex tensor, a different one on each rank."""
    return torch.complex(normal(rank, *shape, seed=seed), normal(rank, *shape, seed=seed + 50))


def common(*shape: int, seed: int = 0) -> Tensor:
    """A random tensor, the same on every rank."""
    return normal(0, *shape, seed=seed + 7)


def invariant(x: Tensor) -> Input:
    """An input that is the same on every rank, and whose gradient is whole on every rank."""
    return Input(x, gm.I)


def replicated(x: Tensor) -> Input:
    """An input that is the same on every rank, and whose gradient is the sum of the ranks'."""
    return Input(x, gm.R)


def weighted(y: Tensor, rank: int = 0) -> Tensor:
    """A loss with another weight for each element, and for each rank that asks for one of its own."""
    weight = torch.linspace(0.5, 1.5, y.numel(), dtype=torch.float64).view(y.shape)
    return (weight * (1 + rank) * torch.sin(y)).sum()
