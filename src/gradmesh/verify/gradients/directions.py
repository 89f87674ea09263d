"""Directions of perturbations, derived from names so that every rank generates the same without communication."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["direction", "unit"]


def direction(seed: int, key: str, number: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A random direction: independent normally distributed elements, real and imaginary.

    Args:
        seed: different seeds give different directions.
        key: the name of the perturbed leaf.
        number: the index of the direction.
        shape: its shape.
        dtype: real or complex.

    Example:
        >>> a, b = (direction(0, "x", n, (2,), torch.float64) for n in (0, 1))
        >>> torch.equal(a, direction(0, "x", 0, (2,), torch.float64)), torch.equal(a, b)
        (True, False)
    """
    digest = hashlib.blake2b(f"{seed} {key} {number}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
    return torch.randn(tuple(shape), dtype=dtype, generator=generator)


def unit(number: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The unit vector of one element; for complex dtypes first the real parts, then the imaginary ones."""
    size = torch.Size(shape).numel()
    flat = torch.zeros(size, dtype=dtype)
    flat[number % size] = torch.tensor(1 if number < size else 1j)
    return flat.view(torch.Size(shape))
