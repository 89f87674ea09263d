"""Layers of sharded fields with halo exchange: convolution, transposed convolution, pooling, interpolation.

`Cut` is how a field is sharded along a dim, `Taps` are the input rows of a sliding kernel, and `window` is the halo
exchange that gets them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.compiler import assume_constant_result
from torch.nn import functional
from torch.nn.functional import pad

from gradmesh._torch import outside_modes
from gradmesh.errors import DTypeError
from gradmesh.nn.inputs import check_own_size
from gradmesh.ops.sizes import intervals
from gradmesh.runtime.mesh import Axis, AxisLike
from gradmesh.transport.run import constants
from gradmesh.verbs.call import Call, SizesLike, integer
from gradmesh.verbs.collectives import halo_exchange, replicate

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
    def spans(self) -> list[tuple[int, int]]:
        """Each rank's rows as half-open intervals."""
        return intervals(self.sizes)


def cut_of(verb: str, x: Tensor, axis: AxisLike, dim: int, sizes: SizesLike) -> Cut:
    """`cuts_of` for operators that support one sharded dim; several axes raise AxisError."""
    return cuts_of(verb, x, Call(verb, x, axis).axis, dim, sizes)[0]


def cuts_of(verb: str, x: Tensor, axis: AxesLike, dim: DimsLike, sizes: Rows) -> list[Cut]:
    """The checked cuts of the arguments `axis`, `dim` and `sizes`."""
    axes = axis if isinstance(axis, tuple) else (axis,)
    dims = dim if isinstance(dim, tuple) else (dim,)
    each: tuple[SizesLike, ...]
    if isinstance(axis, tuple) and isinstance(sizes, (tuple, list)):
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
        check_own_size(call, cuts[-1].sizes, x.shape[place], f"rows along dim {place}")
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
    """The rows of the full field that this rank needs, by halo exchange, and how many are missing on either side.

    `needs` are each rank's rows as half-open intervals, which may extend beyond the ends, where `wrap` continues.
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


@dataclass(frozen=True)
class Taps:
    """A kernel along one dim: output j takes the rows `j * stride - left + i * dilation`, i = 0 ... kernel - 1.

    `ceil` is `ceil_mode` of `torch.nn.MaxPool1d`: a last window may extend beyond the padding.
    """

    kernel: int
    stride: int = 1
    dilation: int = 1
    left: int = 0
    right: int = 0
    ceil: bool = False

    @property
    def reach(self) -> int:
        """The extent of the kernel in rows."""
        return self.dilation * (self.kernel - 1) + 1

    def outputs(self, rows: int) -> int:
        """The number of outputs for a number of rows."""
        free = rows + self.left + self.right - self.reach
        count = max((free + (self.stride - 1) * self.ceil) // self.stride + 1, 0)
        return count - (self.ceil and (count - 1) * self.stride >= rows + self.left)

    def shares(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """Each rank's number of outputs: output j is on the rank that has row min(j * stride, rows - 1)."""
        return shares(sizes, self.outputs(sum(sizes)), down=self.stride)

    def needs(self, first: int, last: int) -> tuple[int, int]:
        """The rows that the outputs `first` ... `last - 1` need, as a half-open interval."""
        begin = first * self.stride - self.left
        return (begin, begin + (last - first - 1) * self.stride + self.reach) if first < last else (0, 0)


def each_dim(value: int | Sequence[int], dims: int, least: int = 0) -> tuple[int, ...] | None:
    """One int >= `least` for each spatial dim, or None if the argument is invalid."""
    given = value if isinstance(value, Sequence) else (value,) * dims
    found = tuple(n for n in map(integer, given) if n is not None and n >= least)
    return found if len(found) == len(given) == dims else None


def slid(
    verb: str, x: Tensor, cuts: Sequence[Cut], taps: Sequence[Taps], mode: str = "zeros"
) -> tuple[Tensor, list[tuple[int, int]], list[int]]:
    """The rows that this rank's outputs need, including padding along sharded dims unless mode is "zeros".

    Then, for each spatial dim, the missing padding on either side, and the local number of outputs.
    """
    if x.dim() != len(taps) + 2 or any(cut.dim < 2 for cut in cuts):
        Call(verb, x, cuts[0].axis).fail(
            "the field has a wrong number of dims, or is not sharded along a spatial dim",
            expected=f"(n, c, rows, ...) with {len(taps) + 2} dims, sharded along dims >= 2",
            got=f"shape {list(x.shape)}, sharded along dim {', '.join(str(cut.dim) for cut in cuts)}",
            remedy="add a batch dim, x.unsqueeze(0), or pass the sharded spatial dim, e.g. dim=2",
        )
    found = {cut.dim: cut for cut in cuts}
    pads, counts = [], []
    for dim, tap in enumerate(taps, 2):
        cut = found.get(dim)
        rows = x.shape[dim] if cut is None else cut.total
        count = tap.outputs(rows)
        most = {"circular": rows, "reflect": rows - 1}.get(mode)
        if count <= 0 or not rows or (most is not None and max(tap.left, tap.right) > most):
            Call(verb, x, cuts[0].axis).fail(
                f"the field is too small for the kernel along dim {dim}",
                expected=f"at least {tap.reach} rows including padding; padding of at most the number of rows with "
                "padding_mode='circular', and one less with 'reflect'",
                got=f"{rows} rows over all ranks, padding {tap.left} and {tap.right}, padding_mode={mode!r}",
                remedy="use a smaller kernel or more padding"
                if count <= 0 or not rows
                else "use less padding",
            )
        if cut is None:
            counts.append(count)
            pads.append((tap.left, max(tap.right, tap.needs(0, count)[1] - rows)))
            continue
        each = tap.shares(cut.sizes)
        needs = [tap.needs(*span) for span in intervals(each)]
        counts.append(each[cut.axis.rank])
        if mode in ("reflect", "replicate"):
            x, missing = _continued(x, cut, needs, mode), (0, 0)
        else:
            x, missing = window(x, cut, needs, mode == "circular")
        pads.append(missing)
    return x, pads, counts


def _continued(x: Tensor, cut: Cut, needs: Sequence[tuple[int, int]], mode: str) -> Tensor:
    """The rows that this rank needs; rows beyond the field's ends are copies of rows inside."""
    last = cut.total - 1

    def inside(place: int) -> int:
        return last - abs(last - abs(place)) if mode == "reflect" else min(max(place, 0), last)

    def sources(begin: int, end: int) -> tuple[int, int]:
        # The map is monotone between the field's ends.
        found = [inside(place) for place in (begin, end - 1, 0, last) if begin <= place < end]
        return (min(found), max(found) + 1) if found else (0, 0)

    from_rows = [sources(*need) for need in needs]
    x, _ = window(x, cut, from_rows)
    (begin, end), first = needs[cut.axis.rank], from_rows[cut.axis.rank][0]

    def copies(begin: int, end: int) -> Tensor:
        places = constants([inside(place) - first for place in range(begin, end)], x.device)
        return x.index_select(cut.dim, places.long())

    if begin >= 0 and end <= cut.total:
        return x
    low, high = min(max(begin, 0), end), max(min(end, cut.total), begin)
    parts = [copies(begin, low)] if begin < low else []
    if low < high:
        parts.append(x.narrow(cut.dim, low - first, high - low))
    parts += [copies(high, end)] if high < end else []
    return torch.cat(parts, cut.dim)


def padded(x: Tensor, pads: Sequence[tuple[int, int]], mode: str = "constant", value: float = 0.0) -> Tensor:
    """Pad each spatial dim by (before, after) rows."""
    if not any(any(pair) for pair in pads):
        return x
    flat = [rows for pair in reversed(pads) for rows in pair]
    return pad(x, flat, mode, value) if mode == "constant" else pad(x, flat, mode)


def replicated(parameters: tuple[Tensor, ...], axes: Sequence[AxisLike]) -> tuple[Tensor, ...]:
    """Parameters for use on local rows: backward sums their gradients over the ranks."""
    for axis in axes:
        parameters = replicate(parameters, axis)
    return parameters


class Halo(nn.Module):
    """Base class of convolutions of sharded fields; `over` is the `axis` argument, `rows` each rank's rows."""

    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: str | tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    in_channels: int
    out_channels: int
    weight: Tensor
    bias: Tensor | None

    def __init__(
        self,
        *args: Any,
        axis: AxesLike = None,
        dim: DimsLike = 2,
        sizes: Rows = None,
        replicated: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.over, self.dim, self.rows, self.replicated = axis, dim, sizes, replicated

    @property
    def name(self) -> str:
        """The layer's name, for errors."""
        return f"nn.{type(self).__name__}"

    def taps(self) -> list[Taps]:
        """The kernel along each spatial dim."""
        taps = []
        for dim, kernel in enumerate(self.kernel_size):
            left = right = 0
            if self.padding == "same":
                left, right = divmod(self.dilation[dim] * (kernel - 1), 2)
                left, right = left, left + right
            elif not isinstance(self.padding, str):
                left = right = self.padding[dim]
            taps.append(Taps(kernel, self.stride[dim], self.dilation[dim], left, right))
        return taps

    def shares(self, sizes: Sequence[int], index: int) -> tuple[int, ...]:
        """Each rank's number of outputs along a spatial dim."""
        return self.taps()[index].shares(sizes)

    def output_sizes(self, sizes: Any) -> tuple[Any, ...]:
        """Each rank's output rows from each rank's input rows; for several axes, a tuple of these.

        Example:
            >>> layer = gm.nn.HaloConv1d(1, 1, 3, stride=2, padding=1)
            >>> layer.output_sizes((4, 1, 2))
            (2, 1, 1)
        """
        if isinstance(self.dim, tuple):
            return tuple(
                self.shares(each, self._spatial(dim)) for each, dim in zip(sizes, self.dim, strict=True)
            )
        return self.shares(sizes, self._spatial(self.dim))

    def _spatial(self, dim: int) -> int:
        """The index of a spatial dim, from 0."""
        return dim - 2 if dim >= 0 else dim + len(self.kernel_size)

    def check_input(self, x: Tensor) -> None:
        """Check channels and dtype on every rank; torch would check them only on ranks that have rows."""
        axis = self.over[0] if isinstance(self.over, tuple) else self.over
        if x.dim() != len(self.kernel_size) + 2 or x.shape[1] != self.in_channels:
            Call(self.name, x, axis).fail(
                "the input has a wrong number of channels or dims",
                expected=f"shape (n, {self.in_channels}, ...) with {len(self.kernel_size) + 2} dims",
                got=f"shape {list(x.shape)}",
                remedy="add the batch dim, x.unsqueeze(0)"
                if x.dim() == len(self.kernel_size) + 1
                else "put the channels in dim 1, or construct the layer for this input",
            )
        if x.dtype != self.weight.dtype and not torch.is_autocast_enabled(x.device.type):
            Call(self.name, x, axis).fail(
                "the input's dtype differs from the weight's",
                expected=f"{self.weight.dtype}, or torch.autocast",
                got=str(x.dtype),
                remedy="convert one of them, e.g. x.to(layer.weight.dtype)",
                kind=DTypeError,
            )

    def parameters_here(self) -> tuple[Tensor, Tensor | None]:
        """Weight and bias for use on local rows."""
        params: tuple[Tensor, ...] = (self.weight,) if self.bias is None else (self.weight, self.bias)
        if self.replicated:
            params = replicated(params, self.over if isinstance(self.over, tuple) else (self.over,))
        return params[0], None if self.bias is None else params[-1]


class _HaloConv(Halo):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # torch's name
        """This rank's rows of the output."""
        self.check_input(input)
        mode = str(self.padding_mode)
        cuts = cuts_of(self.name, input, self.over, self.dim, self.rows)
        x, pads, counts = slid(self.name, input, cuts, self.taps(), mode)
        weight, bias = self.parameters_here()
        if not min(counts):
            return empty_output(x, (len(x), self.out_channels, *counts), weight, bias)
        if mode != "zeros":
            x, inner = padded(x, pads, mode), [0] * len(pads)
        else:  # the convolution adds symmetric padding itself, without a copy
            inner = [left if left == right else 0 for left, right in pads]
            x = padded(x, [(a - i, b - i) for (a, b), i in zip(pads, inner, strict=True)])
        convolve: Any = (functional.conv1d, functional.conv2d, functional.conv3d)[len(pads) - 1]
        return convolve(x, weight, bias, self.stride, inner, self.dilation, self.groups)  # type: ignore[no-any-return]


class HaloConv1d(_HaloConv, nn.Conv1d):
    """`torch.nn.Conv1d` over a field (n, c, rows) whose rows are sharded over ranks, with all derivatives.

    ::

        V -> V    local rows (n, c_in, rows_r) -> local rows (n, c_out, outputs_r)
                  forward: halo exchange with the neighbours; backward: the halo's gradients are sent back and added
        I -> R    weight and bias, by `gm.replicate`: their gradients are summed over the ranks

    Output j is on the rank that has row min(j * stride, rows - 1); `output_sizes` returns each rank's number. Shards
    may be uneven, empty, or smaller than the kernel: the halo then comes from several ranks.

    Args:
        in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode, device, dtype: as
            in `torch.nn.Conv1d`. The padding modes "zeros", "reflect" and "replicate" apply at the ends of the full
            field, and "circular" connects them; `padding="same"` is supported.
        axis: the ranks; or a tuple of axes.
        dim: the sharded dim; or a tuple with one for each axis.
        sizes: each rank's rows along it, e.g. `sizes=(4, 3)`; None: equal; "auto": exchanged; or a tuple of these, one
            for each axis.
        replicated: False if a data parallel wrapper over the same ranks sums the parameters' gradients.

    Raises:
        ArgumentError: wrong number of channels, or a field smaller than the kernel or the padding.
        DTypeError: the input's dtype differs from the weight's.

    The state dict is that of the dense layer.

    Source: Dryden et al., Improving strong-scaling of CNN training by exploiting
    finer-grained parallelism (arXiv:1903.06681), section 3.

    Example:
        >>> def on_each_rank():
        ...     layer = gm.nn.HaloConv1d(1, 1, 3, padding=1, bias=False)
        ...     torch.nn.init.ones_(layer.weight)
        ...     x = torch.arange(6.0).view(1, 1, 6)[..., gm.axis().slice(6)]
        ...     return layer(x).flatten().tolist()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [[1.0, 3.0, 6.0], [9.0, 12.0, 9.0]]
    """


class HaloConv2d(_HaloConv, nn.Conv2d):
    """`torch.nn.Conv2d` over a sharded field (n, c, rows, columns); as `HaloConv1d`.

    Example:
        >>> def on_each_rank():
        ...     layer = gm.nn.HaloConv2d(1, 2, 3, padding="same", padding_mode="circular", sizes=(3, 1))
        ...     dense = torch.nn.Conv2d(1, 2, 3, padding="same", padding_mode="circular")
        ...     layer.load_state_dict(dense.state_dict())
        ...     x = torch.arange(20.0).view(1, 1, 4, 5)
        ...     local = gm.axis().slice((3, 1))
        ...     return torch.allclose(layer(x[:, :, local]), dense(x)[:, :, local], atol=1e-4)
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [True, True]
    """


class HaloConv3d(_HaloConv, nn.Conv3d):
    """`torch.nn.Conv3d` over a sharded field of three spatial dims; as `HaloConv1d`.

    Example:
        >>> def on_each_rank():
        ...     layer = gm.nn.HaloConv3d(1, 2, 3, padding=1, dim=4)
        ...     return tuple(layer(torch.ones(1, 1, 4, 4, 2)).shape)
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [(1, 2, 4, 4, 2), (1, 2, 4, 4, 2)]
    """


_TRANSPOSED = (functional.conv_transpose1d, functional.conv_transpose2d, functional.conv_transpose3d)


class _HaloConvTranspose(Halo):
    output_padding: tuple[int, ...]

    def outputs(self, rows: int, index: int) -> int:
        """The number of outputs for a number of rows along a spatial dim."""
        tap = self.taps()[index]
        return (rows - 1) * tap.stride - tap.left - tap.right + tap.reach + self.output_padding[index]

    def shares(self, sizes: Sequence[int], index: int) -> tuple[int, ...]:
        """Each rank's number of outputs: output j is on the rank that has row min(j // stride, rows - 1)."""
        return shares(sizes, self.outputs(sum(sizes), index), up=self.stride[index])

    def forward(self, input: Tensor, output_size: Sequence[int] | None = None) -> Tensor:  # noqa: A002
        """This rank's rows of the output."""
        self.check_input(input)
        cuts = cuts_of(self.name, input, self.over, self.dim, self.rows)
        call = Call(self.name, input, cuts[0].axis)
        if output_size is not None:
            call.fail(
                "output_size is not supported for a sharded field",
                expected="output_size=None",
                got=f"output_size={output_size!r}",
                remedy="construct the layer with output_padding, e.g. output_padding=1",
            )
        x, counts, aheads = input, [], []
        found = {cut.dim: cut for cut in cuts}
        for place, tap in enumerate(self.taps()):
            cut = found.get(place + 2)
            rows = x.shape[place + 2] if cut is None else cut.total
            whole = self.outputs(rows, place)
            if whole <= 0 or not rows:
                call.fail(
                    f"the output is empty along dim {place + 2}",
                    expected="at least 1 output",
                    got=f"{rows} rows over all ranks, padding {tap.left}: {whole} outputs",
                    remedy="use less padding, or a larger field",
                )
            first, count, begin = 0, whole, 0
            if cut is not None:
                each, needs = self.shares(cut.sizes, place), []
                for share, span in zip(each, cut.spans, strict=True):
                    low = -(-(first + tap.left - tap.reach + 1) // tap.stride)
                    high = (first + share - 1 + tap.left) // tap.stride + 1
                    # At least one local row, so that the convolution has input even if no tap reaches the outputs.
                    low, high = max(min(low, span[0]), 0), min(max(high, span[0] + 1), rows)
                    needs.append((low, high) if share else (0, 0))
                    first += share
                rank = cut.axis.rank
                first, count, begin = sum(each[:rank]), each[rank], needs[rank][0]
                x, _ = window(x, cut, needs)
            counts.append(count)
            aheads.append(first + tap.left - begin * tap.stride)
        weight, bias = self.parameters_here()
        if not min(counts):
            return empty_output(x, (len(x), self.out_channels, *counts), weight, bias)
        convolve: Any = _TRANSPOSED[len(counts) - 1]
        y: Tensor = convolve(x, weight, None, self.stride, 0, 0, self.groups, self.dilation)
        for place, (count, ahead) in enumerate(zip(counts, aheads, strict=True)):
            y = _cropped(y, place + 2, ahead, count)
        return y if bias is None else y + bias.to(y.dtype).view(1, -1, *[1] * len(counts))


def _cropped(y: Tensor, dim: int, ahead: int, count: int) -> Tensor:
    """`count` rows starting at row `ahead`, zero-padded."""
    rows = y.shape[dim]
    low = min(max(ahead, 0), rows)
    high = max(min(ahead + count, rows), low)
    y = y.narrow(dim, low, high - low)
    before = min(max(-ahead, 0), count)
    pads = [(0, 0)] * (y.dim() - 2)
    pads[dim - 2] = (before, count - before - (high - low))
    return padded(y, pads)


class HaloConvTranspose1d(_HaloConvTranspose, nn.ConvTranspose1d):
    """`torch.nn.ConvTranspose1d` over a field (n, c, rows) whose rows are sharded over ranks.

    ::

        V -> V    local rows (n, c_in, rows_r) -> local rows (n, c_out, outputs_r)
                  forward: halo exchange with the neighbours; backward: the halo's gradients are sent back and added

    Input rows are exchanged, not partial outputs: with a stride they are fewer. Output j is on the rank that has row
    min(j // stride, rows - 1).

    Args:
        in_channels, out_channels, kernel_size, stride, padding, output_padding, groups, bias: as in
            `torch.nn.ConvTranspose1d`, and so are dilation, padding_mode, device and dtype.
        axis, dim, sizes, replicated: as in `HaloConv1d`.

    Raises:
        ArgumentError: wrong number of channels, an empty output, or an `output_size`.
        DTypeError: the input's dtype differs from the weight's.

    Example:
        >>> def on_each_rank():
        ...     layer = gm.nn.HaloConvTranspose1d(1, 1, 3, stride=2, bias=False)
        ...     torch.nn.init.ones_(layer.weight)
        ...     return layer(torch.full((1, 1, 2), 1.0 + gm.rank())).flatten().tolist()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [[1.0, 1.0, 2.0, 1.0], [3.0, 2.0, 4.0, 2.0, 2.0]]
    """


class HaloConvTranspose2d(_HaloConvTranspose, nn.ConvTranspose2d):
    """`torch.nn.ConvTranspose2d` over a sharded field; as `HaloConvTranspose1d`.

    Example:
        >>> def on_each_rank():
        ...     layer = gm.nn.HaloConvTranspose2d(1, 2, 2, stride=2, sizes=(1, 2))
        ...     return tuple(layer(torch.ones(1, 1, 1 + gm.rank(), 3)).shape), layer.output_sizes((1, 2))
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [((1, 2, 2, 6), (2, 4)), ((1, 2, 4, 6), (2, 4))]
    """


class HaloConvTranspose3d(_HaloConvTranspose, nn.ConvTranspose3d):
    """`torch.nn.ConvTranspose3d` over a sharded field; as `HaloConvTranspose1d`.

    Example:
        >>> def on_each_rank():
        ...     return tuple(gm.nn.HaloConvTranspose3d(1, 2, 2, stride=2)(torch.ones(1, 1, 2, 2, 2)).shape)
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [(1, 2, 4, 4, 4), (1, 2, 4, 4, 4)]
    """


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
    pool: Any = (functional.max_pool1d, functional.max_pool2d, functional.max_pool3d)[len(taps) - 1]
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
    pool: Any = (functional.avg_pool1d, functional.avg_pool2d, functional.avg_pool3d)[len(taps) - 1]
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
            weights = constants([tap.kernel / rows for rows in taken], y.device, y.dtype)
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
        own = intervals(shares(cut.sizes, grid.outputs, grid.outputs, grid.rows))
        needs = [grid.needs(*span) for span in own]
        (first, last), begin = own[cut.axis.rank], needs[cut.axis.rank][0]
        x, _ = window(x, cut, needs)
        if first == last:
            return empty_output(x, (*x.shape[:dim], 0, *x.shape[dim + 1 :]))
    places = grid.places()[first:last]
    lower = x.index_select(dim, constants([int(place) - begin for place in places], x.device))
    if grid.mode != "linear":
        return lower
    upper = [min(int(place) + 1, grid.rows - 1) - begin for place in places]
    between = constants([place - int(place) for place in places], x.device, x.dtype)
    between = between.view([-1 if d == dim else 1 for d in range(x.dim())])
    return torch.lerp(lower, x.index_select(dim, constants(upper, x.device)), between)


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
        scales = (scale_factor,) * dims if isinstance(scale_factor, (int, float)) else tuple(scale_factor)
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
