"""Convolutions of fields that are cut over ranks along their rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from gradmesh.arguments import Call
from gradmesh.axis import AxisLike
from gradmesh.collectives import replicate
from gradmesh.errors import DTypeError
from gradmesh.nn.fields.cuts import AxesLike, DimsLike, Rows, cuts_of, nothing
from gradmesh.nn.fields.taps import Taps, padded, slid

__all__ = ["Halo", "HaloConv1d", "HaloConv2d", "HaloConv3d", "replicated"]

_CONVOLUTIONS = (functional.conv1d, functional.conv2d, functional.conv3d)


def replicated(parameters: tuple[Tensor, ...], axes: Sequence[AxisLike]) -> tuple[Tensor, ...]:
    """Parameters for use on own rows: backward sums their gradients over the ranks."""
    for axis in axes:
        parameters = replicate(parameters, axis)
    return parameters


class Halo(nn.Module):
    """What the layers share: where the field is cut, and the parameters.

    Attributes:
        over: the axis, or the axes, as given.
        dim: the dim that is cut, or those.
        rows: each rank's rows.
        replicated: whether the layer sums its parameters' gradients over the ranks.
    """

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

    def shares(self, sizes: Sequence[int], place: int) -> tuple[int, ...]:
        """Each rank's outputs along the spatial dim of this place."""
        return self.taps()[place].shares(sizes)

    def output_sizes(self, sizes: Any) -> tuple[Any, ...]:
        """Each rank's rows of the output, of each rank's rows of the input; for several axes a tuple of such.

        Example:
            >>> layer = gm.nn.HaloConv1d(1, 1, 3, stride=2, padding=1)
            >>> layer.output_sizes((4, 1, 2))
            (2, 1, 1)
        """
        if isinstance(self.dim, tuple):
            return tuple(
                self.shares(each, self._place(dim)) for each, dim in zip(sizes, self.dim, strict=True)
            )
        return self.shares(sizes, self._place(self.dim))

    def _place(self, dim: int) -> int:
        return dim - 2 if dim >= 0 else dim + len(self.kernel_size)

    def known(self, x: Tensor) -> None:
        """Refuse an input of other channels or numbers, which torch does where a rank has rows."""
        axis = self.over[0] if isinstance(self.over, tuple) else self.over
        if x.dim() != len(self.kernel_size) + 2 or x.shape[1] != self.in_channels:
            Call(self.name, x, axis).fail(
                "the input has other channels or dims",
                expected=f"(n, {self.in_channels}, ...) with {len(self.kernel_size) + 2} dims",
                got=f"shape {list(x.shape)}",
                remedy="the channels are dim 1; add a batch dim where there is none",
            )
        if x.dtype != self.weight.dtype and not torch.is_autocast_enabled(x.device.type):
            Call(self.name, x, axis).fail(
                "the input has other numbers than the weight",
                expected=f"{self.weight.dtype}, or torch.autocast around the layer",
                got=str(x.dtype),
                remedy="cast one of the two",
                kind=DTypeError,
            )

    def parameters_here(self) -> tuple[Tensor, Tensor | None]:
        """Weight and bias for use on own rows."""
        there: tuple[Tensor, ...] = (self.weight,) if self.bias is None else (self.weight, self.bias)
        if self.replicated:
            there = replicated(there, self.over if isinstance(self.over, tuple) else (self.over,))
        return there[0], None if self.bias is None else there[-1]


class _HaloConv(Halo):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # torch's name
        """Own rows of the output."""
        self.known(input)
        mode = str(self.padding_mode)
        cuts = cuts_of(self.name, input, self.over, self.dim, self.rows)
        x, pads, counts = slid(self.name, input, cuts, self.taps(), mode)
        weight, bias = self.parameters_here()
        if not min(counts):
            return nothing(x, (len(x), self.out_channels, *counts), weight, bias)
        if mode != "zeros":
            x, inner = padded(x, pads, mode), [0] * len(pads)
        else:  # what is alike on both sides the convolution adds itself, without a copy
            inner = [left if left == right else 0 for left, right in pads]
            x = padded(x, [(a - i, b - i) for (a, b), i in zip(pads, inner, strict=True)])
        convolve: Any = _CONVOLUTIONS[len(pads) - 1]
        return convolve(x, weight, bias, self.stride, inner, self.dilation, self.groups)  # type: ignore[no-any-return]


class HaloConv1d(_HaloConv, nn.Conv1d):
    """A convolution over a field (n, c, rows) whose rows are cut over ranks: `torch.nn.Conv1d`, in every derivative.

    ::

        V -> V    own rows (n, c_in, rows_r) -> own rows (n, c_out, outputs_r)
                  forward: edge rows of the neighbours; backward: their gradients go home and are added
        I -> R    weight and bias, by `gm.replicate`: their gradients are summed over the ranks, and whole on each

    Output j is on the rank that has row min(j * stride, rows - 1): `output_sizes` tells how many each has. Parts may be
    uneven and empty, and smaller than the kernel: rows then come from ranks further on.

    Args:
        in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode, device, dtype: as
            in `torch.nn.Conv1d`. The padding modes "zeros", "reflect" and "replicate" apply at the ends of the whole
            field, and "circular" connects them; `padding="same"` is there too.
        axis: the ranks; or a tuple of axes.
        dim: the dim that is cut; or a tuple with one for each axis.
        sizes: each rank's rows along it, None for equal ones, or "auto"; or a tuple with these for each axis.
        replicated: False where a data parallel wrapper over the same ranks sums the parameters' gradients.

    Raises:
        ArgumentError: other channels, or a field smaller than the kernel or than the padding.
        DTypeError: numbers of another dtype than the weight's.

    The state dict is the dense layer's. Source: Dryden et al., Improving strong-scaling of CNN training by exploiting
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
    """A convolution over a field (n, c, rows, columns) that is cut over ranks: as `HaloConv1d`, for two dims.

    Example:
        >>> def on_each_rank():
        ...     layer = gm.nn.HaloConv2d(1, 2, 3, padding="same", padding_mode="circular", sizes=(3, 1))
        ...     dense = torch.nn.Conv2d(1, 2, 3, padding="same", padding_mode="circular")
        ...     layer.load_state_dict(dense.state_dict())
        ...     x = torch.arange(20.0).view(1, 1, 4, 5)
        ...     own = gm.axis().slice((3, 1))
        ...     return torch.allclose(layer(x[:, :, own]), dense(x)[:, :, own], atol=1e-4)
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [True, True]
    """


class HaloConv3d(_HaloConv, nn.Conv3d):
    """A convolution over a field of three dims that is cut over ranks: as `HaloConv1d`.

    Example:
        >>> def on_each_rank():
        ...     layer = gm.nn.HaloConv3d(1, 2, 3, padding=1, dim=4)
        ...     return tuple(layer(torch.ones(1, 1, 4, 4, 2)).shape)
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [(1, 2, 4, 4, 2), (1, 2, 4, 4, 2)]
    """
