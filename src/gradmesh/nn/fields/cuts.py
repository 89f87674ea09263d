"""How a field is sharded, and the halo exchange that gets the rows that a rank's outputs need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import cast

import torch
from torch import Tensor

from gradmesh.runtime.mesh import Axis, AxisLike
from gradmesh.verbs.call import Call, SizesLike
from gradmesh.verbs.collectives import halo_exchange

__all__ = ["AxesLike", "Cut", "DimsLike", "Rows", "cut_of", "cuts_of", "empty_output", "shares", "window"]

AxesLike = AxisLike | tuple[AxisLike, ...]
"""The axis over which a field is sharded; a tuple if several dims are sharded."""

DimsLike = int | tuple[int, ...]
"""The sharded dim, or one for each axis."""

Rows = SizesLike | tuple[SizesLike, ...]
"""Each rank's rows along the dim; for several dims, a tuple with one entry for each, or None or "auto" for all."""


@dataclass(frozen=True)
class Cut:
    """A sharded dim of a field, and each rank's number of rows."""

    axis: Axis
    dim: int
    sizes: tuple[int, ...]

    @property
    def total(self) -> int:
        """The rows on all ranks."""
        return sum(self.sizes)

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Each rank's rows as half-open intervals."""
        return tuple(pairwise(accumulate(self.sizes, initial=0)))


def cut_of(verb: str, x: Tensor, axis: AxisLike, dim: int, sizes: SizesLike) -> Cut:
    """`cuts_of` for operators that support one sharded dim; several axes raise AxisError."""
    return cuts_of(verb, x, Call(verb, x, axis).axis, dim, sizes)[0]


def cuts_of(verb: str, x: Tensor, axis: AxesLike, dim: DimsLike, sizes: Rows) -> list[Cut]:
    """The checked cuts of the arguments `axis`, `dim` and `sizes`."""
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
            "axis, dim and sizes do not have the same length",
            expected=f"one dim for each of {len(axes)} axes; sizes for each, or None or 'auto' for all",
            got=f"axis={axis!r}, dim={dim!r}, sizes={sizes!r}",
            remedy='pass e.g. axis=("rows", "columns"), dim=(2, 3), sizes="auto"',
        )
    cuts = []
    for call, one, rows in zip(calls, dims, each, strict=True):
        place = call.dim(one)
        cuts.append(Cut(call.axis, place, call.explicit_sizes(rows, place).explicit))
        if cuts[-1].sizes[call.axis.rank] != x.shape[place]:
            call.fail(
                f"sizes does not match this rank's rows along dim {place}",
                expected=f"size {cuts[-1].sizes[call.axis.rank]}, from sizes={cuts[-1].sizes}",
                got=f"size {x.shape[place]}",
                remedy='pass the true sizes, or sizes="auto" to exchange them',
            )
    if len({cut.dim for cut in cuts}) != len(cuts) or len({cut.axis for cut in cuts}) != len(cuts):
        calls[0].fail(
            "a dim or an axis is repeated",
            expected="distinct dims for distinct axes",
            got=f"axis={axis!r}, dim={dim!r}",
            remedy='pass e.g. axis=("rows", "columns"), dim=(2, 3)',
        )
    return cuts


def shares(sizes: Sequence[int], outputs: int, up: int = 1, down: int = 1) -> tuple[int, ...]:
    """Each rank's number of outputs: output j is on the rank that has row min(j * down // up, rows - 1).

    >>> shares((3, 0, 2), 3, down=2)  # outputs at rows 0, 2 and 4
    (2, 0, 1)
    """
    total = sum(sizes)
    ends = [outputs if end == total else min(-(-end * up // down), outputs) for end in accumulate(sizes)]
    return tuple(last - first for first, last in pairwise((0, *ends)))


def window(
    x: Tensor, cut: Cut, needs: Sequence[tuple[int, int]], wrap: bool = False
) -> tuple[Tensor, tuple[int, int]]:
    """The rows of the full field that this rank needs, by halo exchange.

    Args:
        x: the local rows.
        cut: how they are sharded.
        needs: the rows that each rank needs, as half-open intervals, which may extend beyond the ends.
        wrap: True if the field is periodic.

    Returns:
        The existing rows, and how many are missing on either side.
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


def empty_output(x: Tensor, shape: Sequence[int], *parameters: Tensor | None) -> Tensor:
    """An output without rows that depends on its inputs and parameters, so that backward runs on every rank."""
    kind = x.device.type
    if parameters and torch.is_autocast_enabled(kind) and x.is_floating_point() and x.dtype != torch.float64:
        x = x.to(torch.get_autocast_dtype(kind))  # the dtype on ranks that have rows
    made = x.sum()
    for number, parameter in enumerate(parameters):
        if parameter is not None:
            made = made + parameter.sum() if number else made * parameter.sum()
    return x.new_zeros(tuple(shape)) * made
