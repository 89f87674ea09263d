"""The reductions that the backends support."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gradmesh.errors import ArgumentError, message

__all__ = ["REDUCTIONS", "averaged", "reduction"]

REDUCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
"""The reductions by torch's names, as functions of two tensors. AVG is divided afterwards, by `averaged`."""


def averaged(total: torch.Tensor, count: int) -> torch.Tensor:
    """Divide a sum by the number of ranks, in place; integers are truncated towards zero."""
    if total.is_floating_point() or total.is_complex():
        return total.div_(count)
    return total.copy_(torch.div(total, count, rounding_mode="trunc"))


_names: dict[Any, str] = {}


def reduction(opts: Any, backend: str) -> str:
    """The name of the reduction in a call's options.

    Raises:
        ArgumentError: it is not supported.
    """
    if opts is None:
        return "SUM"
    kind = opts.reduceOp.op
    name = _names.get(kind)
    if name is None:
        name = _names[kind] = kind.name
    if name not in REDUCTIONS:
        raise ArgumentError(
            message(
                f"reduction not supported by the {backend} backend",
                expected=", ".join(REDUCTIONS),
                got=name,
                remedy="multiply the tensor first and use ReduceOp.SUM" if name == "PREMUL_SUM" else None,
            )
        )
    return name
