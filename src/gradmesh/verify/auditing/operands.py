"""Random operands and gradients, drawn from a seed, in any memory layout."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["LAYOUTS", "draw", "in_layout"]


def draw(shape: Sequence[int], dtype: torch.dtype, seed: int, owner: int, *, whole: bool = False) -> Tensor:
    """Random values: normally distributed, or integers that any floating-point dtype represents exactly.

    Args:
        shape: the shape.
        dtype: a floating-point or complex dtype.
        seed: different seeds give different values.
        owner: the rank that owns them; for a replicated value all ranks pass the same number.
        whole: draw small nonzero integers.
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
"""The non-contiguous memory layouts to try, with their description."""


def in_layout(x: Tensor, layout: str) -> Tensor | None:
    """A differentiable copy of a tensor in that layout, or None if its shape does not allow the layout.

    In an expanded layout the values are those of the first element or row.

    Args:
        x: the values, contiguous.
        layout: a name in `LAYOUTS`.
    """
    if x.numel() < 2:
        return None
    if layout == "transposed":
        transposed = x.transpose(0, -1).contiguous().transpose(0, -1) if x.ndim > 1 else x
        return None if transposed.is_contiguous() else transposed
    if layout == "gapped":
        return torch.stack([x, 2 * x], -1)[..., 0]
    if layout == "expanded":
        return x[:1].expand_as(x) if x.shape[0] > 1 and x.ndim > 1 else None
    return x.reshape(-1)[0].expand(x.shape)
