"""Fourier transforms along one dim, also of tensors without elements, which torch's libraries refuse."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

__all__ = ["Norm", "transformed"]

Norm = Literal["backward", "ortho", "forward"] | None
_KINDS: dict[str, Any] = {
    "fft": torch.fft.fft,
    "ifft": torch.fft.ifft,
    "rfft": torch.fft.rfft,
    "irfft": torch.fft.irfft,
}


def transformed(kind: str, x: Tensor, dim: int, n: int | None = None, norm: Norm = None) -> Tensor:
    """`torch.fft.fft`, `ifft`, `rfft` or `irfft`, by name.

    >>> transformed("rfft", torch.ones(0, 4), 1).shape
    torch.Size([0, 3])
    """
    if x.numel() or not x.shape[dim]:
        made: Tensor = _KINDS[kind](x, n, dim=dim, norm=norm)
        return made
    size = x.shape[dim] if n is None else n
    if kind == "rfft":
        size = size // 2 + 1
    elif kind == "irfft" and n is None:
        size = 2 * (size - 1)
    shape = (*x.shape[:dim], size, *x.shape[dim + 1 :])
    total = x.sum()
    if kind == "irfft":
        return total.real.new_zeros(shape) * total.real
    return x.new_zeros(shape, dtype=torch.promote_types(x.dtype, torch.complex32)) * total
