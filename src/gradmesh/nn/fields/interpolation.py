"""Fields that are cut over ranks, on a finer or coarser grid."""

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
from gradmesh.arguments import Call
from gradmesh.nn.fields.cuts import AxesLike, Cut, DimsLike, Rows, cuts_of, nothing, shares, window
from gradmesh.nn.fields.taps import each_dim

__all__ = ["interpolate"]

Mode = Literal["nearest", "nearest-exact", "linear", "bilinear", "trilinear"]
_LINEAR = ("linear", "bilinear", "trilinear")


@dataclass(frozen=True)
class _Grid:
    """A dim with `rows` rows, on `outputs` points, of a field of `dims` such."""

    dims: int
    rows: int
    outputs: int
    scale: float | None
    mode: str
    align_corners: bool | None
    double: bool

    def places(self) -> tuple[float, ...]:
        """Where the outputs are, counted in rows: torch's own answer, with its own roundings."""
        found: tuple[float, ...] = _places(
            self.dims, self.rows, self.outputs, self.scale, self.mode, self.align_corners, self.double
        )
        return found

    def needs(self, first: int, last: int) -> tuple[int, int]:
        """The rows of the outputs `first` ... `last - 1`."""
        if first >= last:
            return 0, 0
        places = self.places()
        return int(places[first]), min(int(places[last - 1]) + 2, self.rows)


# Numbers, which a compiler is to have and not to trace.
@assume_constant_result  # type: ignore[untyped-decorator]
def _places(
    dims: int, rows: int, outputs: int, scale: float | None, mode: str, corners: bool | None, double: bool
) -> tuple[float, ...]:
    return _found(dims, rows, outputs, scale, mode, corners, double)


@lru_cache(maxsize=256)
def _found(
    dims: int, rows: int, outputs: int, scale: float | None, mode: str, corners: bool | None, double: bool
) -> tuple[float, ...]:
    # In as many dims as the field has, and in its precision: in others torch rounds "nearest" differently.
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
    """A field that is cut over ranks, on another grid: `torch.nn.functional.interpolate`.

    ::

        V -> V    own rows (n, c, rows_r, ...) -> own rows (n, c, outputs_r, ...)

    Output j of m is on the rank that has row floor(j * rows / m).

    Args:
        x: own rows.
        size: the whole grid's, on all ranks together: a number, or one for each spatial dim.
        scale_factor: or how much finer it is.
        mode: "nearest", "nearest-exact", or linear along each spatial dim: "linear", "bilinear", "trilinear".
        align_corners: as in `torch.nn.functional.interpolate`.
        axis, dim, sizes: as in `gradmesh.nn.HaloConv1d`.

    Raises:
        ArgumentError: both or none of `size` and `scale_factor`; another mode; a grid without points.

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
            return nothing(x, (*x.shape[:dim], 0, *x.shape[dim + 1 :]))
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
            "the grid is not told for each spatial dim",
            expected=f"size or scale_factor, a number or {dims} of them; and a field of 3 to 5 dims, cut from dim 2 on",
            got=f"size={size!r}, scale_factor={scale_factor!r}, shape {list(x.shape)}, "
            f"cut along {', '.join(map(str, found))}",
            remedy="pass one of the two",
        )
    if not linear and (mode not in ("nearest", "nearest-exact") or align_corners is not None):
        call.fail(
            "there is no such interpolation here",
            expected="mode 'nearest' or 'nearest-exact' without align_corners, or linear along each spatial dim",
            got=f"mode={mode!r}, align_corners={align_corners!r}, {dims} spatial dims",
            remedy="area is gradmesh.nn.fields.avg_pool where the grid divides",
        )
    grids = []
    for place in range(dims):
        rows = found[place + 2].total if place + 2 in found else x.shape[place + 2]
        points = sized[place] if sized else int(rows * scales[place])
        if points < 1 or rows < 1:
            call.fail(
                f"a grid has no points along dim {place + 2}",
                expected="1 or more rows, and as many points",
                got=f"{rows} rows, {points} points",
                remedy="pass another size",
            )
        corners = bool(align_corners) if linear else None
        kind, scale = "linear" if linear else mode, scales[place] if scales else None
        double = linear or (x.dtype == torch.float64 and x.device.type == "cpu")
        grids.append(_Grid(dims, rows, points, scale, kind, corners, double))
    return grids
