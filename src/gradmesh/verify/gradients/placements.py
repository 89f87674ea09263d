"""How a tensor of one process lies on the ranks: cut along a dimension, or whole on each."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from gradmesh.axis import balanced
from gradmesh.errors import ArgumentError, message
from gradmesh.types import Type

__all__ = ["Placement", "Shard", "chosen", "part_of"]


@dataclass(frozen=True)
class Shard:
    """A tensor that is cut along a dimension: each rank has its part, which varies, and the gradient of it.

    Args:
        value: the whole tensor, where an input is placed; None where parameters are, by name.
        dim: the dimension.
        sizes: each rank's size along it; None: cut as evenly as can be, the first ranks one more, as `gradmesh.shard`.
        constant: whether an input's gradient is left alone.

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
    """What a rank has of a whole tensor.

    Raises:
        ArgumentError: the sizes do not make up the whole.
    """
    if not isinstance(placement, Shard):
        return whole
    total = whole.shape[placement.dim]
    sizes = list(balanced(total, ranks) if placement.sizes is None else placement.sizes)
    if len(sizes) != ranks or sum(sizes) != total:
        raise ArgumentError(
            message(
                "the sizes of a shard do not make up the whole",
                op="verify.same_as_single",
                expected=f"{ranks} sizes that add up to {total}",
                got=str(sizes),
                remedy="give each rank's size along dim, or none for an even cut",
            )
        )
    return whole.narrow(placement.dim, sum(sizes[:rank]), sizes[rank])


def chosen(placements: Mapping[str, T], name: str, default: T) -> T:
    """What a name is placed as: by the first pattern of `fnmatch` that fits it."""
    return next(
        (place for pattern, place in placements.items() if fnmatch.fnmatchcase(name, pattern)), default
    )
