"""Operands and gradients that every rank draws for itself from a seed, in any memory layout."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["LAYOUTS", "draw", "laid_out"]


def draw(shape: Sequence[int], dtype: torch.dtype, seed: int, owner: int, *, whole: bool = False) -> Tensor:
    """Random values: normal ones, or whole numbers that any floating-point dtype holds exactly.

    Args:
        shape: the shape.
        dtype: a floating-point or complex dtype.
        seed: another number, other values.
        owner: whose they are; the ranks of a value that is the same on all of them pass the same number.
        whole: small whole numbers other than 0.
    """
    generator = torch.Generator(device="cpu").manual_seed(7919 * seed + 104729 * (owner + 1))
    size = (*shape, 2) if dtype.is_complex else tuple(shape)
    if whole:
        sign = 2 * torch.randint(0, 2, size, generator=generator, device="cpu") - 1
        values = (sign * torch.randint(1, 8, size, generator=generator, device="cpu")).double()
    else:
        values = torch.randn(size, generator=generator, dtype=torch.float64, device="cpu")
    return (torch.view_as_complex(values) if dtype.is_complex else values).to(dtype)


LAYOUTS = {
    "transposed": "transposed in memory",
    "gapped": "every other element of a larger tensor",
    "expanded": "expanded along dim 0",
    "flat": "one value expanded to all elements",
}
"""The memory layouts that are tried beside a contiguous one, in words."""


def laid_out(x: Tensor, layout: str) -> Tensor | None:
    """A tensor with strides of that layout, differentiably, or None where the shape has no such layout.

    Where elements share memory, the values are those of the first ones.

    Args:
        x: the values, contiguous.
        layout: a name in `LAYOUTS`.
    """
    if x.numel() < 2:
        return None
    if layout == "transposed":
        turned = x.transpose(0, -1).contiguous().transpose(0, -1) if x.ndim > 1 else x
        return None if turned.is_contiguous() else turned
    if layout == "gapped":
        return torch.stack([x, 2 * x], -1)[..., 0]
    if layout == "expanded":
        return x[:1].expand_as(x) if x.shape[0] > 1 and x.ndim > 1 else None
    return x.reshape(-1)[0].expand(x.shape)
