"""Placements of a tensor on the ranks: sharded along a dimension, or replicated."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from gradmesh.errors import ArgumentError, message
from gradmesh.runtime.mesh import balanced
from gradmesh.types import Type

__all__ = ["Placement", "Shard", "chosen", "part_of"]


@dataclass(frozen=True)
class Shard:
    """A tensor that is sharded along a dimension; its type over the ranks is V.

    Args:
        value: the full tensor, for an input; None for parameters and outputs, which are given by name.
        dim: the dimension.
        sizes: each rank's size along `dim`, e.g. (4, 3). None: balanced, with the first ranks one larger, as in
            `gradmesh.shard`.
        constant: True: the input's gradient is not compared.

    Example:
        >>> part_of(torch.arange(5), Shard(sizes=(1, 4)), 1, 2)
        tensor([1, 2, 3, 4])
    """

    value: Tensor | None = None
    dim: int = 0
    sizes: Sequence[int] | None = None
    constant: bool = False


Placement = Shard | Type

T = TypeVar("T")


def part_of(whole: Tensor, placement: Placement, rank: int, ranks: int) -> Tensor:
    """A rank's part of a full tensor.

    Raises:
        ArgumentError: the sizes do not add up to the full size.
    """
    if not isinstance(placement, Shard):
        return whole
    total = whole.shape[placement.dim]
    sizes = list(balanced(total, ranks) if placement.sizes is None else placement.sizes)
    if len(sizes) != ranks or sum(sizes) != total:
        raise ArgumentError(
            message(
                "the sizes of a shard do not add up to the tensor's size",
                op="verify.same_as_single",
                expected=f"{ranks} sizes that add up to {total}, the size along dim {placement.dim}",
                got=f"sizes={tuple(sizes)}",
                remedy=f"pass e.g. sizes={tuple(balanced(total, ranks))}, or leave sizes out for this balanced split",
            )
        )
    return whole.narrow(placement.dim, sum(sizes[:rank]), sizes[rank])


def chosen(placements: Mapping[str, T], name: str, default: T) -> T:
    """The placement for a name: that of the first matching `fnmatch` pattern, else the default."""
    return next(
        (place for pattern, place in placements.items() if fnmatch.fnmatchcase(name, pattern)), default
    )
