"""Transposed convolutions of sharded fields, with halo exchange."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from gradmesh.nn.fields.convolution import Halo
from gradmesh.nn.fields.cuts import cuts_of, empty_output, shares, window
from gradmesh.nn.fields.taps import padded
from gradmesh.verbs.call import Call

__all__ = ["HaloConvTranspose1d", "HaloConvTranspose2d", "HaloConvTranspose3d"]

_CONVOLUTIONS = (functional.conv_transpose1d, functional.conv_transpose2d, functional.conv_transpose3d)


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
        convolve: Any = _CONVOLUTIONS[len(counts) - 1]
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
