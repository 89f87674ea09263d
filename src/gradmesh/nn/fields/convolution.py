"""Convolutions of sharded fields, with halo exchange."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from gradmesh.errors import DTypeError
from gradmesh.nn.fields.cuts import AxesLike, DimsLike, Rows, cuts_of, empty_output
from gradmesh.nn.fields.taps import Taps, padded, slid
from gradmesh.runtime.mesh import AxisLike
from gradmesh.verbs.call import Call
from gradmesh.verbs.collectives import replicate

__all__ = ["Halo", "HaloConv1d", "HaloConv2d", "HaloConv3d", "replicated"]

_CONVOLUTIONS = (functional.conv1d, functional.conv2d, functional.conv3d)


def replicated(parameters: tuple[Tensor, ...], axes: Sequence[AxisLike]) -> tuple[Tensor, ...]:
    """Parameters for use on local rows: backward sums their gradients over the ranks."""
    for axis in axes:
        parameters = replicate(parameters, axis)
    return parameters


class Halo(nn.Module):
    """Base class of convolutions of sharded fields.

    Attributes:
        over: the `axis` argument.
        dim: the sharded dim, or dims.
        rows: each rank's rows.
        replicated: True if the layer sums its parameters' gradients over the ranks.
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
        convolve: Any = _CONVOLUTIONS[len(pads) - 1]
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
