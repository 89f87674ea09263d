"""Interpolation of sharded fields."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor
from torch.compiler import assume_constant_result
from torch.nn import functional

from gradmesh._torch import outside_modes
from gradmesh.nn.fields.cuts import AxesLike, Cut, DimsLike, Rows, cuts_of, empty_output, shares, window
from gradmesh.nn.fields.taps import each_dim
from gradmesh.verbs.call import Call

__all__ = ["interpolate"]

Mode = Literal["nearest", "nearest-exact", "linear", "bilinear", "trilinear"]
_LINEAR = ("linear", "bilinear", "trilinear")


@dataclass(frozen=True)
class _Grid:
    """Interpolation of one of `dims` spatial dims from `rows` rows to `outputs` points."""

    dims: int
    rows: int
    outputs: int
    scale: float | None
    mode: str
    align_corners: bool | None
    double: bool

    def places(self) -> tuple[float, ...]:
        """The position of each output in rows, as torch computes it, with torch's rounding."""
        found: tuple[float, ...] = _places(
            self.dims, self.rows, self.outputs, self.scale, self.mode, self.align_corners, self.double
        )
        return found

    def needs(self, first: int, last: int) -> tuple[int, int]:
        """The rows that the outputs `first` ... `last - 1` need, as a half-open interval."""
        if first >= last:
            return 0, 0
        places = self.places()
        return int(places[first]), min(int(places[last - 1]) + 2, self.rows)


# torch.compile must use these numbers as constants, not trace their computation.
@assume_constant_result  # type: ignore[untyped-decorator]
def _places(
    dims: int, rows: int, outputs: int, scale: float | None, mode: str, corners: bool | None, double: bool
) -> tuple[float, ...]:
    return _found(dims, rows, outputs, scale, mode, corners, double)


@lru_cache(maxsize=256)
def _found(
    dims: int, rows: int, outputs: int, scale: float | None, mode: str, corners: bool | None, double: bool
) -> tuple[float, ...]:
    # With the field's number of dims and precision: torch's rounding of "nearest" depends on both.
    ones = (1,) * (dims - 1)
    scales = None if scale is None else (scale, *map(float, ones))

    def find() -> tuple[float, ...]:
        line = torch.arange(rows, dtype=torch.float64 if double else torch.float32, device="cpu")
        found = functional.interpolate(
            line.view(1, 1, rows, *ones),
            None if scales else (outputs, *ones),
            scales,
            _LINEAR[dims - 1] if mode == "linear" else mode,
            corners,
        )
        return tuple(found.flatten().tolist())

    return outside_modes(find)


def interpolate(
    x: Tensor,
    size: int | Sequence[int] | None = None,
    axis: AxesLike = None,
    *,
    scale_factor: float | Sequence[float] | None = None,
    mode: Mode = "nearest",
    align_corners: bool | None = None,
    dim: DimsLike = 2,
    sizes: Rows = None,
) -> Tensor:
    """`torch.nn.functional.interpolate` of a sharded field.

    ::

        V -> V    local rows (n, c, rows_r, ...) -> local rows (n, c, outputs_r, ...)

    Output j of m is on the rank that has row floor(j * rows / m).

    Args:
        x: the local rows.
        size: of the full result over all ranks: an int, or one for each spatial dim.
        scale_factor: an alternative to `size`.
        mode: "nearest", "nearest-exact", or linear along each spatial dim: "linear", "bilinear", "trilinear".
        align_corners: as in `torch.nn.functional.interpolate`.
        axis, dim, sizes: as in `gradmesh.nn.HaloConv1d`.

    Raises:
        ArgumentError: not exactly one of `size` and `scale_factor`; unsupported `mode`; an empty result.

    Example:
        >>> def on_each_rank():
        ...     x = torch.arange(3.0).view(1, 1, 3)[..., gm.axis().slice((2, 1))]
        ...     y = gm.nn.fields.interpolate(x, 5, mode="linear", align_corners=True, sizes=(2, 1))
        ...     return y.flatten().tolist()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [[0.0, 0.5, 1.0, 1.5], [2.0]]
    """
    verb = "nn.fields.interpolate"
    cuts = cuts_of(verb, x, axis, dim, sizes)
    found = {cut.dim: cut for cut in cuts}
    for place, grid in enumerate(_grids(verb, x, found, size, scale_factor, mode, align_corners), 2):
        cut = found.get(place)
        if cut is not None or grid.rows != grid.outputs or grid.scale not in (None, 1.0):
            x = _along(x, place, grid, cut)
    return x


def _along(x: Tensor, dim: int, grid: _Grid, cut: Cut | None) -> Tensor:
    first, last, begin = 0, grid.outputs, 0
    if cut is not None:
        own, needs, low = shares(cut.sizes, grid.outputs, grid.outputs, grid.rows), [], 0
        for share in own:
            needs.append(grid.needs(low, low + share))
            low += share
        rank = cut.axis.rank
        first, begin = sum(own[:rank]), needs[rank][0]
        last = first + own[rank]
        x, _ = window(x, cut, needs)
        if first == last:
            return empty_output(x, (*x.shape[:dim], 0, *x.shape[dim + 1 :]))
    places = grid.places()[first:last]
    lower = x.index_select(dim, torch.tensor([int(place) - begin for place in places], device=x.device))
    if grid.mode != "linear":
        return lower
    upper = [min(int(place) + 1, grid.rows - 1) - begin for place in places]
    between = x.new_tensor([place - int(place) for place in places])
    between = between.view([-1 if d == dim else 1 for d in range(x.dim())])
    return torch.lerp(lower, x.index_select(dim, torch.tensor(upper, device=x.device)), between)


def _grids(
    verb: str,
    x: Tensor,
    found: dict[int, Cut],
    size: int | Sequence[int] | None,
    scale_factor: float | Sequence[float] | None,
    mode: str,
    align_corners: bool | None,
) -> list[_Grid]:
    dims = x.dim() - 2
    linear = mode in _LINEAR[dims - 1 : dims] or mode == "linear"
    call = Call(verb, x, next(iter(found.values())).axis)
    sized = () if size is None else each_dim(size, dims)
    scales: tuple[float, ...] = ()
    if scale_factor is not None:
        scales = (scale_factor,) * dims if isinstance(scale_factor, int | float) else tuple(scale_factor)
    if sized is None or min(found) < 2 or {len(sized), len(scales)} != {0, dims} or not 1 <= dims <= 3:
        call.fail(
            "size, scale_factor or the field's shape is not valid",
            expected=f"either size or scale_factor, a number or one for each spatial dim ({dims}); and a field of 3 to "
            "5 dims, sharded along dims >= 2",
            got=f"size={size!r}, scale_factor={scale_factor!r}, shape {list(x.shape)}, "
            f"sharded along dim {', '.join(map(str, found))}",
            remedy="pass e.g. size=64 or scale_factor=2.0, not both",
        )
    if not linear and (mode not in ("nearest", "nearest-exact") or align_corners is not None):
        call.fail(
            "unsupported interpolation mode",
            expected='mode="nearest" or "nearest-exact" without align_corners, or mode="linear"',
            got=f"mode={mode!r}, align_corners={align_corners!r}, {dims} spatial dims",
            remedy='for mode="area" with an integer ratio, use gradmesh.nn.fields.avg_pool'
            if mode == "area"
            else 'pass e.g. mode="linear"',
        )
    grids = []
    for place in range(dims):
        rows = found[place + 2].total if place + 2 in found else x.shape[place + 2]
        points = sized[place] if sized else int(rows * scales[place])
        if points < 1 or rows < 1:
            call.fail(
                f"the input or the result is empty along dim {place + 2}",
                expected="at least 1 row and 1 point over all ranks",
                got=f"{rows} rows, {points} points",
                remedy="pass a larger size or scale_factor"
                if rows
                else "pass a field with rows on at least one rank",
            )
        corners = bool(align_corners) if linear else None
        kind, scale = "linear" if linear else mode, scales[place] if scales else None
        double = linear or (x.dtype == torch.float64 and x.device.type == "cpu")
        grids.append(_Grid(dims, rows, points, scale, kind, corners, double))
    return grids
