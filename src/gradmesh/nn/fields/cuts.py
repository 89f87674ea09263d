"""How a field is cut over ranks, and how a rank gets the rows of it that its own outputs need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import cast

import torch
from torch import Tensor

from gradmesh.arguments import Call, SizesLike
from gradmesh.axis import Axis, AxisLike
from gradmesh.collectives import halo_exchange

__all__ = ["AxesLike", "Cut", "DimsLike", "Rows", "cut_of", "cuts_of", "nothing", "shares", "window"]

AxesLike = AxisLike | tuple[AxisLike, ...]
"""The axis that a field is cut over, or a tuple of them where several dims are cut."""

DimsLike = int | tuple[int, ...]
"""The dim that is cut, or one for each axis."""

Rows = SizesLike | tuple[SizesLike, ...]
"""Each rank's rows along the dim; where several are cut, a tuple with those of each, or one word for all."""


@dataclass(frozen=True)
class Cut:
    """A dim of a field, and how many of its rows each rank of an axis has."""

    axis: Axis
    dim: int
    sizes: tuple[int, ...]

    @property
    def total(self) -> int:
        """The rows on all ranks."""
        return sum(self.sizes)

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Each rank's first row, and the one behind its last."""
        return tuple(pairwise(accumulate(self.sizes, initial=0)))


def cut_of(verb: str, x: Tensor, axis: AxisLike, dim: int, sizes: SizesLike) -> Cut:
    """The cut that a caller tells of a layer that takes one.

    Raises:
        AxisError: several axes.
    """
    return cuts_of(verb, x, Call(verb, x, axis).axis, dim, sizes)[0]


def cuts_of(verb: str, x: Tensor, axis: AxesLike, dim: DimsLike, sizes: Rows) -> list[Cut]:
    """The cuts that a caller tells.

    Raises:
        ArgumentError: not one dim for each axis, or a dim twice.
    """
    axes = axis if isinstance(axis, tuple) else (axis,)
    dims = dim if isinstance(dim, tuple) else (dim,)
    each: tuple[SizesLike, ...]
    if isinstance(axis, tuple) and isinstance(sizes, tuple | list):
        each = cast("tuple[SizesLike, ...]", tuple(sizes))
    else:
        each = (cast("SizesLike", sizes),) * len(axes)
    calls = [Call(verb, x, one) for one in axes]
    if not len(axes) == len(dims) == len(each) or not axes:
        calls[0].fail(
            "there is not one dim for each axis",
            expected=f"{len(axes)} dims, and rows for each",
            got=f"dim={dim!r}, sizes={sizes!r}",
            remedy="pass tuples of one length for axis and dim, and for sizes, or one word for sizes",
        )
    cuts = []
    for call, one, rows in zip(calls, dims, each, strict=True):
        place = call.dim(one)
        cuts.append(Cut(call.axis, place, call.explicit_sizes(rows, place).explicit))
        if cuts[-1].sizes[call.axis.rank] != x.shape[place]:
            call.fail(
                f"dim {place} is not what sizes says for this rank",
                expected=f"size {cuts[-1].sizes[call.axis.rank]}, from sizes={cuts[-1].sizes}",
                got=f"size {x.shape[place]}",
                remedy='pass the true sizes, or sizes="auto" to have them exchanged',
            )
    if len({cut.dim for cut in cuts}) != len(cuts) or len({cut.axis for cut in cuts}) != len(cuts):
        calls[0].fail(
            "a dim or an axis is named twice",
            expected="other dims for other axes",
            got=f"axis={axis!r}, dim={dim!r}",
            remedy="name each once",
        )
    return cuts


def shares(sizes: Sequence[int], outputs: int, up: int = 1, down: int = 1) -> tuple[int, ...]:
    """How many of the outputs each rank has: output j is on the rank that has row min(j * down // up, rows - 1).

    >>> shares((3, 0, 2), 3, down=2)  # outputs at rows 0, 2 and 4
    (2, 0, 1)
    """
    total = sum(sizes)
    ends = [outputs if end == total else min(-(-end * up // down), outputs) for end in accumulate(sizes)]
    return tuple(last - first for first, last in pairwise((0, *ends)))


def window(
    x: Tensor, cut: Cut, needs: Sequence[tuple[int, int]], wrap: bool = False
) -> tuple[Tensor, tuple[int, int]]:
    """The rows of the whole field that this rank needs.

    Args:
        x: the own rows.
        cut: how they are cut.
        needs: the first row that each rank needs, and the one behind its last; they may lie beyond the ends.
        wrap: whether the field is periodic.

    Returns:
        The rows that there are, and how many are missing on either side.
    """
    left = right = 0
    for span, need in zip(cut.spans, needs, strict=True):
        if need[0] < need[1]:
            left, right = max(left, span[0] - need[0]), max(right, need[1] - span[1])
    low, high = cut.spans[cut.axis.rank]
    if left or right:
        x = halo_exchange(x, cut.axis, cut.dim, halo=(left, right), wrap=wrap, sizes=cut.sizes)
        low, high = low - left, high + right
        if not wrap:
            low, high = max(low, 0), min(high, cut.total)
    first, last = needs[cut.axis.rank]
    if first >= last:
        return x.narrow(cut.dim, 0, 0), (0, 0)
    begin, end = max(first, low), min(last, high)
    if begin >= end:
        return x.narrow(cut.dim, 0, 0), (last - first, 0)
    if (begin, end) != (low, high):
        x = x.narrow(cut.dim, begin - low, end - begin)
    return x, (begin - first, last - end)


def nothing(x: Tensor, shape: Sequence[int], *parameters: Tensor | None) -> Tensor:
    """An output without rows, that depends on what it would be made of: backward is to run on every rank alike.

    Args:
        x: the rows that there are for it, none.
        shape: of the output.
        parameters: the weight, and what is added to the product with it.
    """
    kind = x.device.type
    if parameters and torch.is_autocast_enabled(kind) and x.is_floating_point() and x.dtype != torch.float64:
        x = x.to(torch.get_autocast_dtype(kind))  # as the ranks that have rows
    made = x.sum()
    for number, parameter in enumerate(parameters):
        if parameter is not None:
            made = made + parameter.sum() if number else made * parameter.sum()
    return x.new_zeros(tuple(shape)) * made
