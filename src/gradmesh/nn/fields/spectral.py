"""The spectral convolution of Fourier neural operators, on sharded fields."""

from __future__ import annotations

from collections.abc import Sequence
from math import pi, prod

import torch
from torch import Tensor, nn

from gradmesh.errors import ArgumentError, message
from gradmesh.nn.fields.cuts import Cut, cut_of
from gradmesh.nn.fields.fourier import transformed
from gradmesh.nn.plain import upcast
from gradmesh.runtime.mesh import AxisLike, balanced
from gradmesh.types import I, R
from gradmesh.verbs.call import Call, SizesLike
from gradmesh.verbs.collectives import all_gather, reduce_scatter, shard

__all__ = ["SpectralConv"]


class SpectralConv(nn.Module):
    r"""The layer of Fourier neural operators: multiplies the lowest modes of a field by a matrix for each mode.

    ::

        V -> V    local rows (n, c_in, rows_r, ...) -> local rows (n, c_out, rows_r, ...)

                  local terms of the kept modes   \                                     / local rows from all modes
                                                   reduce-scatter, weight, all-gather
                  local terms of the kept modes   /                                     \ local rows from all modes

        I -> V    the weight; each rank uses its share of the modes, and the gradient is complete on every rank

    The value is `irfftn(W * rfftn(x))` with the kept modes: along the last dim the lowest `modes[-1]`, along the others
    the lowest in both directions, 2 `modes[d]`. Only the kept modes are sent, independent of the number of rows
    (`rfftn`, a full transform, sends the field). Each rank multiplies its share of the modes. Fields of bfloat16 and
    float16 are transformed in float32, and the result is converted back.

    Args:
        in_channels, out_channels: of the field.
        modes: number of kept modes; an int for one spatial dim, or one for each.
        axis: the ranks.
        dim: the sharded dim.
        sizes: each rank's rows along it, as in `gradmesh.nn.HaloConv1d`.
        replicated: False if a data parallel wrapper over the same ranks sums the parameters' gradients.
        device: of the weight.
        dtype: of the field: float64 gives a complex128 weight, any other dtype a complex64 one.

    Attributes:
        weight: shape (in_channels, out_channels, 2 modes[0], ..., modes[-1]), complex.

    Raises:
        ArgumentError: wrong number of channels or dims, or a field with fewer modes.

    Source: Li et al., Fourier neural operator (arXiv:2010.08895), equation 5.

    Example:
        >>> def on_each_rank():
        ...     layer = gm.nn.SpectralConv(1, 1, 3, sizes=(4, 3))
        ...     torch.nn.init.constant_(layer.weight, 0.5 - 0.25j)
        ...     x = torch.arange(7.0).view(1, 1, 7) ** 2
        ...     modes = torch.fft.rfft(x)[..., :3] * layer.weight
        ...     local = gm.axis().slice((4, 3))
        ...     return torch.allclose(layer(x[..., local]), torch.fft.irfft(modes, 7)[..., local], atol=1e-4)
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [True, True]
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        modes: int | Sequence[int],
        axis: AxisLike = None,
        *,
        dim: int = 2,
        sizes: SizesLike = None,
        replicated: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.modes = (modes,) if isinstance(modes, int) else tuple(modes)
        if not self.modes or min(self.modes) < 1:
            raise ArgumentError(
                message(
                    "modes must be positive",
                    op="nn.SpectralConv",
                    expected="an int >= 1 for each spatial dim",
                    got=f"modes={modes!r}",
                    remedy="pass e.g. modes=16, or modes=(12, 12) for two spatial dims",
                )
            )
        self.in_channels, self.out_channels = in_channels, out_channels
        self.over, self.dim, self.rows, self.replicated = axis, dim, sizes, replicated
        kind = torch.complex128 if dtype == torch.float64 else torch.complex64
        shape = (in_channels, out_channels, *(2 * m for m in self.modes[:-1]), self.modes[-1])
        draw = torch.rand(shape, device=device, dtype=kind)
        self.weight = nn.Parameter(draw / (in_channels * out_channels))

    def forward(self, x: Tensor) -> Tensor:
        """This rank's rows of the output."""
        cut = cut_of("nn.SpectralConv", x, self.over, self.dim, self.rows)
        rows = [cut.total if d == cut.dim else x.shape[d] for d in range(2, x.dim())]
        kept = [*(2 * m for m in self.modes[:-1]), self.modes[-1]]
        available = [*rows[:-1], rows[-1] // 2 + 1 if rows else 0]
        right_dims = len(rows) == len(kept) and cut.dim >= 2
        enough = right_dims and all(k <= most for k, most in zip(kept, available, strict=True))
        if not enough or x.shape[1] != self.in_channels or x.is_complex():
            Call("nn.SpectralConv", x, cut.axis).fail(
                "the field does not match the layer",
                expected=f"a real tensor (n, {self.in_channels}, ...) with {len(kept)} spatial dims, one of them "
                f"sharded, with at least {kept} modes",
                got=f"{x.dtype} of shape {list(x.shape)}, sharded along dim {cut.dim}, {rows} rows over all ranks, "
                f"{available} modes",
                remedy="construct the layer with fewer modes"
                if right_dims and not enough
                else "pass a real field with the layer's channels and dims, and dim >= 2",
            )
        last = x.dim() - 1
        y = upcast(x)
        if cut.dim != last:
            y = transformed("rfft", y, last).narrow(last, 0, kept[-1])
        waves = self._waves(cut, y)
        y = torch.tensordot(y.to(waves.dtype), waves, dims=([cut.dim], [1])).movedim(-1, cut.dim)
        for d in range(2, last):
            if d != cut.dim:
                y = transformed("fft", y, d)
                m = self.modes[d - 2]
                y = torch.cat((y.narrow(d, 0, m), y.narrow(d, rows[d - 2] - m, m)), d)
        y = self._mixed(y, cut)
        for d in range(2, last):
            if d != cut.dim:
                m, gap = self.modes[d - 2], rows[d - 2] - 2 * self.modes[d - 2]
                zeros = y.new_zeros((*y.shape[:d], gap, *y.shape[d + 1 :]))
                y = transformed("ifft", torch.cat((y.narrow(d, 0, m), zeros, y.narrow(d, m, m)), d), d)
        back = waves.conj() / cut.total
        if cut.dim == last:
            # rfft omits conjugate modes: all modes but the first and the middle one count twice.
            twice = [1 + (k > 0 and 2 * k != cut.total) for k in range(kept[-1])]
            back = back * back.real.new_tensor(twice).unsqueeze(1)
        y = torch.tensordot(y, back, dims=([cut.dim], [0])).movedim(-1, cut.dim)
        y = y.real if cut.dim == last else transformed("irfft", y, last, rows[-1])
        return y.to(x.dtype) if x.is_floating_point() else y

    def _waves(self, cut: Cut, like: Tensor) -> Tensor:
        """The kept modes along the sharded dim at local rows, shape (modes, rows_r)."""
        kind = torch.float64 if like.dtype in (torch.float64, torch.complex128) else torch.float32
        m = self.modes[cut.dim - 2]
        low = torch.arange(m, device=like.device)
        modes = low if cut.dim - 1 == len(self.modes) else torch.cat((low, low - m))
        rows = torch.arange(*cut.spans[cut.axis.rank], device=like.device)
        # Integer product modulo the total: no precision is lost for large factors.
        turns = (modes.unsqueeze(1) * rows % cut.total).to(kind) * (-2 * pi / cut.total)
        return torch.complex(turns.cos(), turns.sin())

    def _mixed(self, terms: Tensor, cut: Cut) -> Tensor:
        """Sum the ranks' terms, and multiply each mode by its matrix; each rank multiplies its share of the modes."""
        shape = terms.shape[2:]
        parts = balanced(prod(shape), cut.axis.size)
        local = reduce_scatter(terms.flatten(2), cut.axis, 2, sizes=parts)
        weight = self.weight.flatten(2).to(local.dtype)
        weight = shard(weight, cut.axis, 2, src=I if self.replicated else R, sizes=parts)
        whole: Tensor = all_gather(torch.einsum("nik,iok->nok", local, weight), cut.axis, 2, sizes=parts)
        return whole.reshape(*whole.shape[:2], *shape)

    def extra_repr(self) -> str:
        """Channels and modes."""
        return f"{self.in_channels}, {self.out_channels}, modes {self.modes}"
