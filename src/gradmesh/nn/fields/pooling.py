"""Pooling of sharded fields, with halo exchange."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from gradmesh.errors import DTypeError
from gradmesh.nn.fields.cuts import AxesLike, Cut, DimsLike, Rows, cuts_of, empty_output
from gradmesh.nn.fields.taps import Taps, each_dim, padded, slid
from gradmesh.verbs.call import Call

__all__ = ["HaloAvgPool", "HaloMaxPool", "avg_pool", "max_pool"]

_MAX = (functional.max_pool1d, functional.max_pool2d, functional.max_pool3d)
_MEAN = (functional.avg_pool1d, functional.avg_pool2d, functional.avg_pool3d)

Each = int | Sequence[int]


def max_pool(
    x: Tensor,
    kernel_size: Each,
    axis: AxesLike = None,
    *,
    stride: Each | None = None,
    padding: Each = 0,
    dilation: Each = 1,
    ceil_mode: bool = False,
    dim: DimsLike = 2,
    sizes: Rows = None,
) -> Tensor:
    """`torch.nn.functional.max_pool1d`, 2d or 3d, of a sharded field.

    ::

        V -> V    local rows (n, c, rows_r, ...) -> local rows (n, c, outputs_r, ...)

    Output j is on the rank that has row min(j * stride, rows - 1).

    Args:
        x: the local rows, with 1, 2 or 3 spatial dims.
        kernel_size, stride, padding, dilation, ceil_mode: as in `torch.nn.MaxPool2d`; each a number, or one for each
            spatial dim.
        axis, dim, sizes: as in `gradmesh.nn.HaloConv1d`.

    Raises:
        ArgumentError: a field smaller than the kernel, or padding of more than half of the kernel.
        DTypeError: integer or complex tensors.

    Example:
        >>> def on_each_rank():
        ...     x = torch.tensor([[[3.0, 0.0, 1.0]], [[2.0, 5.0, 4.0]]])[gm.rank()].unsqueeze(0)
        ...     return gm.nn.fields.max_pool(x, 2, stride=1).flatten().tolist()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [[3.0, 1.0, 2.0], [5.0, 5.0]]
    """
    verb = "nn.fields.max_pool"
    cuts = cuts_of(verb, x, axis, dim, sizes)
    taps = _taps(verb, x, cuts, kernel_size, stride, padding, dilation, ceil_mode)
    x, pads, counts = slid(verb, x, cuts, taps)
    if not min(counts):
        return empty_output(x, (*x.shape[:2], *counts))
    pool: Any = _MAX[len(taps) - 1]
    y: Tensor = pool(
        padded(x, pads, value=float("-inf")),
        [tap.kernel for tap in taps],
        [tap.stride for tap in taps],
        0,
        [tap.dilation for tap in taps],
    )
    return y


def avg_pool(
    x: Tensor,
    kernel_size: Each,
    axis: AxesLike = None,
    *,
    stride: Each | None = None,
    padding: Each = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    dim: DimsLike = 2,
    sizes: Rows = None,
) -> Tensor:
    """`torch.nn.functional.avg_pool1d`, 2d or 3d, of a sharded field.

    ::

        V -> V    local rows (n, c, rows_r, ...) -> local rows (n, c, outputs_r, ...)

    Output j is on the rank that has row min(j * stride, rows - 1).

    Args:
        x: the local rows, with 1, 2 or 3 spatial dims.
        kernel_size, stride, padding, ceil_mode, count_include_pad: as in `torch.nn.AvgPool2d`; each a number, or one
            for each spatial dim.
        axis, dim, sizes: as in `gradmesh.nn.HaloConv1d`.

    Raises:
        ArgumentError: a field smaller than the kernel, or padding of more than half of the kernel.
        DTypeError: integer tensors.

    Example:
        >>> def on_each_rank():
        ...     x = torch.arange(6.0).view(1, 1, 6)[..., gm.axis().slice((3, 3))]
        ...     return gm.nn.fields.avg_pool(x, 2).flatten().tolist()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [[0.5, 2.5], [4.5]]
    """
    verb = "nn.fields.avg_pool"
    cuts = cuts_of(verb, x, axis, dim, sizes)
    taps = _taps(verb, x, cuts, kernel_size, stride, padding, 1, ceil_mode)
    whole = [x.shape[dim] for dim in range(2, x.dim())]
    for cut in cuts:
        whole[cut.dim - 2] = cut.total
    x, pads, counts = slid(verb, x, cuts, taps)
    if not min(counts):
        return empty_output(x, (*x.shape[:2], *counts))
    pool: Any = _MEAN[len(taps) - 1]
    numbers = ([tap.kernel for tap in taps], [tap.stride for tap in taps])
    x = padded(x, pads)
    y: Tensor
    y = torch.complex(pool(x.real, *numbers), pool(x.imag, *numbers)) if x.is_complex() else pool(x, *numbers)
    begins = {cut.dim: sum(taps[cut.dim - 2].shares(cut.sizes)[: cut.axis.rank]) for cut in cuts}
    for dim, tap in enumerate(taps, 2):
        first = begins.get(dim, 0)
        taken = [
            _taken(tap, j, whole[dim - 2], count_include_pad) for j in range(first, first + counts[dim - 2])
        ]
        if any(rows != tap.kernel for rows in taken):
            weights = y.new_tensor([tap.kernel / rows for rows in taken])
            y = y * weights.view([-1 if d == dim else 1 for d in range(y.dim())])
    return y


def _taken(tap: Taps, output: int, rows: int, padding: bool) -> int:
    """The number of rows in the mean of an output."""
    begin = output * tap.stride - tap.left
    end = min(begin + tap.kernel, rows + tap.right)
    return end - begin if padding else min(end, rows) - max(begin, 0)


def _taps(
    verb: str,
    x: Tensor,
    cuts: Sequence[Cut],
    kernel: Each,
    stride: Each | None,
    padding: Each,
    dilation: Each,
    ceil: bool,
) -> list[Taps]:
    dims, call = x.dim() - 2, Call(verb, x, cuts[0].axis)
    given = ((kernel, 1), (kernel if stride is None else stride, 1), (padding, 0), (dilation, 1))
    found = [each_dim(value, dims, least) for value, least in given]
    numbers = [each for each in found if each is not None]
    if not 1 <= dims <= 3 or len(numbers) < len(given):
        call.fail(
            "the field's shape or a pooling argument is not valid",
            expected="a field (n, c, ...) of 3 to 5 dims; kernel_size, stride, dilation >= 1 and padding >= 0, each an "
            "int or one for each spatial dim",
            got=f"shape {list(x.shape)}, kernel_size={kernel!r}, stride={stride!r}, padding={padding!r}, "
            f"dilation={dilation!r}",
            remedy="pass e.g. kernel_size=2 for all spatial dims",
        )
    if not x.is_floating_point() and (verb.endswith("max_pool") or not x.is_complex()):
        call.fail(
            "unsupported dtype",
            expected="a floating-point dtype"
            if verb.endswith("max_pool")
            else "a floating-point or complex dtype",
            got=str(x.dtype),
            remedy="pass x.float()" if not x.is_complex() else "pool x.real and x.imag, or x.abs()",
            kind=DTypeError,
        )
    taps = [Taps(k, s, d, p, p, ceil) for k, s, p, d in zip(*numbers, strict=True)]
    if any(2 * tap.left > tap.kernel for tap in taps):
        call.fail(
            "padding is larger than half of the kernel",
            expected="padding <= kernel_size / 2, so that each window contains a row of the field",
            got=f"kernel_size={kernel!r}, padding={padding!r}",
            remedy="use less padding, or pad the field with torch.nn.functional.pad",
        )
    return taps


class _Pool(nn.Module):
    def __init__(self, kernel_size: Each, axis: AxesLike = None, **options: Any) -> None:
        super().__init__()
        self.kernel_size, self.over, self.options = kernel_size, axis, options


class HaloMaxPool(_Pool):
    """`max_pool` as a layer, for one, two or three spatial dims.

    Example:
        >>> gm.launch(lambda: gm.nn.HaloMaxPool(2)(torch.ones(1, 1, 4)).shape[-1], 2, backend="threads")
        [2, 2]
    """

    def forward(self, x: Tensor) -> Tensor:
        """This rank's rows of the maxima."""
        return max_pool(x, self.kernel_size, self.over, **self.options)


class HaloAvgPool(_Pool):
    """`avg_pool` as a layer, for one, two or three spatial dims.

    Example:
        >>> gm.launch(lambda: gm.nn.HaloAvgPool(2)(torch.ones(1, 1, 4)).shape[-1], 2, backend="threads")
        [2, 2]
    """

    def forward(self, x: Tensor) -> Tensor:
        """This rank's rows of the means."""
        return avg_pool(x, self.kernel_size, self.over, **self.options)
