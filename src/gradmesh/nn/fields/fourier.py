"""Discrete Fourier transforms of sharded tensors, by all-to-all transposes, and the spectral convolution."""

from __future__ import annotations

from collections.abc import Sequence
from math import pi, prod
from typing import Literal

import torch
from torch import Tensor, nn

from gradmesh.errors import ArgumentError, DTypeError, ShapeError
from gradmesh.nn.fields.halo import AxesLike, Cut, DimsLike, Rows, cut_of, cuts_of
from gradmesh.nn.inputs import upcast
from gradmesh.ops.sizes import balanced
from gradmesh.runtime.mesh import Axis, AxisLike
from gradmesh.transport.run import constants
from gradmesh.types import I, R
from gradmesh.verbs.call import Call, SizesLike, integer
from gradmesh.verbs.collectives import all_gather, all_to_all, reduce_scatter, shard

Norm = Literal["backward", "ortho", "forward"] | None
_STEPS = {
    "fftn": ("fft", "fft"),
    "ifftn": ("ifft", "ifft"),
    "rfftn": ("fft", "rfft"),
    "irfftn": ("ifft", "irfft"),
}
"""The transforms along all dims but the last, and along the last."""


def transformed(kind: str, x: Tensor, dim: int, n: int | None = None, norm: Norm = None) -> Tensor:
    """`torch.fft.fft`, `ifft`, `rfft` or `irfft`, also of tensors without elements, which torch rejects.

    >>> transformed("rfft", torch.ones(0, 4), 1).shape
    torch.Size([0, 3])
    """
    if x.numel() or not x.shape[dim]:
        made: Tensor = getattr(torch.fft, kind)(x, n, dim=dim, norm=norm)
        return made
    size = x.shape[dim] if n is None else n
    if kind == "rfft":
        size = size // 2 + 1
    elif kind == "irfft" and n is None:
        size = 2 * (size - 1)
    shape = (*x.shape[:dim], size, *x.shape[dim + 1 :])
    total = x.sum()
    if kind == "irfft":
        return total.real.new_zeros(shape) * total.real
    return x.new_zeros(shape, dtype=torch.promote_types(x.dtype, torch.complex32)) * total


class _Layout:
    """A tensor and its sharded dims."""

    def __init__(self, verb: str, x: Tensor, axis: AxesLike, dim: DimsLike, sizes: Rows) -> None:
        self.x, self.verb = x, verb
        self.cuts: dict[int, tuple[Axis, tuple[int, ...]]] = {
            cut.dim: (cut.axis, cut.sizes) for cut in cuts_of(verb, x, axis, dim, sizes)
        }

    def move(self, dim: int, to: int) -> None:
        """Gather the sharded dim `dim`, and shard dim `to` evenly instead."""
        axis, sizes = self.cuts.pop(dim)
        parts = balanced(self.x.shape[to], axis.size)
        self.x = all_to_all(self.x, axis, split_dim=to, concat_dim=dim, split_sizes=parts, concat_sizes=sizes)
        self.cuts[to] = axis, parts

    def whole(self, dim: int, wanted: Sequence[int]) -> None:
        """Gather a dim; shard a free wanted dim instead, else the largest free one."""
        if dim not in self.cuts:
            return
        free = [other for other in range(self.x.dim()) if other != dim and other not in self.cuts]
        if not free:
            Call(self.verb, self.x, self.cuts[dim][0]).fail(
                "all dims are sharded, so a transformed dim cannot be gathered",
                expected="at least one dim that is not sharded",
                got=f"shape {list(self.x.shape)}, sharded along {sorted(self.cuts)}",
                remedy="add a dim, x.unsqueeze(0), and count dim and dims accordingly",
                kind=ShapeError,
            )
        best = free[0]
        for other in free[1:]:
            if (other in wanted, self.x.shape[other]) > (best in wanted, self.x.shape[best]):
                best = other
        self.move(dim, best)

    def restore(self, wanted: dict[Axis, int]) -> None:
        """Shard each axis's wanted dim evenly; two dims are swapped by way of a third."""
        while True:
            left = {dim: wanted[axis] for dim, (axis, _) in self.cuts.items() if wanted[axis] != dim}
            if not left:
                return
            ready = [dim for dim, to in left.items() if to not in self.cuts]
            if ready:
                self.move(ready[0], left[ready[0]])
            else:
                self.whole(next(iter(left)), ())


def _transformed(
    kind: str,
    x: Tensor,
    axis: AxesLike,
    cut: DimsLike,
    dims: Sequence[int] | None,
    out: DimsLike | None,
    sizes: Rows,
    norm: Norm,
    n: int | None = None,
) -> Tensor:
    verb = f"nn.fields.{kind}"
    if not x.is_floating_point() and not x.is_complex():
        x = x.to(torch.get_default_dtype())
    layout = _Layout(verb, x, axis, cut, sizes)
    axes = list(layout.cuts.values())
    call = Call(verb, x, axes[0][0])
    outs = (
        [*layout.cuts]
        if out is None
        else [call.dim(d, "out_dim") for d in (out if isinstance(out, tuple) else (out,))]
    )
    places = [*range(x.dim())] if dims is None else [call.dim(dim, "dims") for dim in dims]
    if len(outs) != len(axes) or len(set(outs)) != len(outs) or len(set(places)) != len(places) or not places:
        call.fail(
            "dims or out_dim is empty, has repeated dims, or a wrong length",
            expected=f"out_dim with {len(axes)} distinct dims (one for each axis), dims with distinct dims",
            got=f"out_dim={out!r}, dims={dims!r}",
            remedy="pass e.g. dims=(0, 1), out_dim=1",
        )
    if not all(sum(layout.cuts[d][1]) if d in layout.cuts else x.shape[d] for d in places):
        call.fail(
            "a transformed dim is empty",
            expected="size >= 1 along each of dims, over all ranks",
            got=f"local shape {list(x.shape)}, dims={dims!r}",
            remedy="remove the empty dim from dims",
            kind=ShapeError,
        )
    last, others = places[-1], places[:-1]
    _checked(call, kind, sum(layout.cuts[last][1]) if last in layout.cuts else x.shape[last], n, norm)
    wanted = dict(zip((axis for axis, _ in axes), outs, strict=True))
    inner, outer = _STEPS[kind]
    # Transform dims that are not sharded first: they need no transpose. The real dim is the first or the last.
    order = [d for d in others if d not in layout.cuts] + [d for d in others if d in layout.cuts]
    for place in [*order, last] if kind == "irfftn" else [last, *order]:
        layout.whole(place, outs)
        given = n if place == last else None
        layout.x = transformed(outer if place == last else inner, layout.x, place, given, norm)
    layout.restore(wanted)
    return layout.x


def _checked(call: Call, kind: str, modes: int, n: int | None, norm: Norm) -> None:
    """Check on every rank; torch would check only on ranks that have elements."""
    call.choose("norm", norm, {None: 0, "backward": 0, "ortho": 0, "forward": 0})
    if call.x.dtype not in (torch.float32, torch.float64, torch.complex64, torch.complex128):
        call.fail(
            "unsupported dtype",
            expected="float32, float64, complex64 or complex128",
            got=str(call.x.dtype),
            remedy="transform x.float()",
            kind=DTypeError,
        )
    points = 2 * (modes - 1) if n is None else integer(n)
    if kind == "irfftn" and (points is None or points < 1):
        call.fail(
            "the size of the real result is not positive",
            expected="n an int >= 1, or n=None for 2 * (modes - 1) with at least 2 modes",
            got=f"n={n!r}, {modes} modes",
            remedy="pass the size of the real tensor along the last dim, e.g. n=1",
            kind=ShapeError,
        )


def fftn(
    x: Tensor,
    axis: AxesLike = None,
    *,
    dim: DimsLike = 0,
    dims: Sequence[int] | None = None,
    out_dim: DimsLike | None = None,
    sizes: Rows = None,
    norm: Norm = None,
) -> Tensor:
    """`torch.fft.fftn` of a sharded tensor.

    ::

        V -> V    (n_r, m, ...) -> (n_r, m, ...)

                  forward: local transforms of the dims that are not sharded; an all-to-all that gathers the sharded dim
                  and shards another one; its transform; an all-to-all back. Backward: the reverse.

    Any size is supported: if the division has a remainder, the first ranks get one row more. The result is sharded that
    way along `out_dim`, also if `sizes` differs; only a sharded dim that is not transformed keeps its sizes.

    Args:
        x: the local shard, real or complex.
        axis: the ranks; or a tuple of axes (pencil decomposition), each of which shards one dim.
        dim: the sharded dim; or one for each axis.
        dims: the dims to transform; None: all.
        out_dim: the sharded dim of the result, or one for each axis; None: `dim`. Another dim saves the transpose back:
            transform with `out_dim=1`, and invert with `dim=1, out_dim=0`.
        sizes: each rank's size along `dim`; as in `gradmesh.nn.HaloConv1d`.
        norm: as in `torch.fft.fftn`.

    Raises:
        ArgumentError: repeated dims, not one dim for each axis, or unknown `norm`.
        ShapeError: all dims are sharded, or a transformed dim is empty.
        DTypeError: dtypes of fewer than 32 bits.

    Source: Frigo and Johnson, The design and implementation of FFTW3 (Proc. IEEE 93, 2005); slabs and pencils as in its
    distributed-memory transforms.

    Example:
        >>> def on_each_rank():
        ...     x = torch.arange(6.0).view(3, 2)
        ...     y = gm.nn.fields.fftn(gm.shard(x, sizes=(2, 1)), sizes=(2, 1))
        ...     return torch.allclose(y, torch.fft.fftn(x)[gm.axis().slice((2, 1))], atol=1e-5)
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [True, True]
    """
    return _transformed("fftn", x, axis, dim, dims, out_dim, sizes, norm)


def ifftn(
    x: Tensor,
    axis: AxesLike = None,
    *,
    dim: DimsLike = 0,
    dims: Sequence[int] | None = None,
    out_dim: DimsLike | None = None,
    sizes: Rows = None,
    norm: Norm = None,
) -> Tensor:
    """`torch.fft.ifftn` of a sharded tensor, the inverse of `fftn`; arguments and types as in `fftn`.

    Example:
        >>> def on_each_rank():
        ...     x = torch.ones(2, 3) * gm.rank()
        ...     y = gm.nn.fields.ifftn(gm.nn.fields.fftn(x, out_dim=1), dim=1, out_dim=0, sizes=(2, 1))
        ...     return torch.allclose(y.real, x, atol=1e-6)
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [True, True]
    """
    return _transformed("ifftn", x, axis, dim, dims, out_dim, sizes, norm)


def rfftn(
    x: Tensor,
    axis: AxesLike = None,
    *,
    dim: DimsLike = 0,
    dims: Sequence[int] | None = None,
    out_dim: DimsLike | None = None,
    sizes: Rows = None,
    norm: Norm = None,
) -> Tensor:
    """`torch.fft.rfftn` of a sharded real tensor; half of the transform along the last dim.

    ::

        V -> V    (n_r, m) -> (n_r, m // 2 + 1), complex

    Args:
        x: the local shard, real.
        axis, dim, dims, out_dim, sizes, norm: as in `fftn`. The last of `dims` is halved.

    Raises:
        ArgumentError, ShapeError, DTypeError: as in `fftn`; and for a complex tensor.

    Example:
        >>> def on_each_rank():
        ...     x = torch.arange(15.0).view(3, 5)
        ...     y = gm.nn.fields.rfftn(x[:, gm.axis().slice(5)], dim=1, sizes=(3, 2))  # the halved dim is sharded
        ...     return y.shape[1], torch.allclose(y, torch.fft.rfftn(x)[:, gm.axis().slice(3)], atol=1e-5)
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [(2, True), (1, True)]
    """
    if x.is_complex():
        Call("nn.fields.rfftn", x, axis[0] if isinstance(axis, tuple) else axis).fail(
            "rfftn does not support complex tensors",
            expected="a real tensor",
            got=str(x.dtype),
            remedy="use gradmesh.nn.fields.fftn",
            kind=DTypeError,
        )
    return _transformed("rfftn", x, axis, dim, dims, out_dim, sizes, norm)


def irfftn(
    x: Tensor,
    axis: AxesLike = None,
    *,
    n: int | None = None,
    dim: DimsLike = 0,
    dims: Sequence[int] | None = None,
    out_dim: DimsLike | None = None,
    sizes: Rows = None,
    norm: Norm = None,
) -> Tensor:
    """`torch.fft.irfftn` of a sharded tensor, the inverse of `rfftn`.

    ::

        V -> V    (n_r, m // 2 + 1) -> (n_r, m), real

    Args:
        x: the local shard of half of a transform.
        n: the size of the real result along the last of `dims`; None: the even size, 2 * (modes - 1).
        axis, dim, dims, out_dim, sizes, norm: as in `fftn`.

    Raises:
        ArgumentError, ShapeError, DTypeError: as in `fftn`; and for an empty result.

    Example:
        >>> def on_each_rank():
        ...     x = torch.rand(2, 5)
        ...     return torch.allclose(gm.nn.fields.irfftn(gm.nn.fields.rfftn(x), n=5), x, atol=1e-6)
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [True, True]
    """
    return _transformed("irfftn", x, axis, dim, dims, out_dim, sizes, norm, n)


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
            raise ArgumentError.of(
                "modes must be positive",
                op="nn.SpectralConv",
                expected="an int >= 1 for each spatial dim",
                got=f"modes={modes!r}",
                remedy="pass e.g. modes=16, or modes=(12, 12) for two spatial dims",
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
        # Sum the ranks' terms, and multiply each mode by its matrix; each rank multiplies its share of the modes.
        shape = y.shape[2:]
        parts = balanced(prod(shape), cut.axis.size)
        local = reduce_scatter(y.flatten(2), cut.axis, 2, sizes=parts)
        weight = self.weight.flatten(2).to(local.dtype)
        weight = shard(weight, cut.axis, 2, src=I if self.replicated else R, sizes=parts)
        whole: Tensor = all_gather(torch.einsum("nik,iok->nok", local, weight), cut.axis, 2, sizes=parts)
        y = whole.reshape(*whole.shape[:2], *shape)
        for d in range(2, last):
            if d != cut.dim:
                m, gap = self.modes[d - 2], rows[d - 2] - 2 * self.modes[d - 2]
                zeros = y.new_zeros((*y.shape[:d], gap, *y.shape[d + 1 :]))
                y = transformed("ifft", torch.cat((y.narrow(d, 0, m), zeros, y.narrow(d, m, m)), d), d)
        back = waves.conj() / cut.total
        if cut.dim == last:
            # rfft omits conjugate modes: all modes but the first and the middle one count twice.
            twice = [1 + (k > 0 and 2 * k != cut.total) for k in range(kept[-1])]
            back = back * constants(twice, back.device, back.real.dtype).unsqueeze(1)
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

    def extra_repr(self) -> str:
        """Channels and modes."""
        return f"{self.in_channels}, {self.out_channels}, modes {self.modes}"
