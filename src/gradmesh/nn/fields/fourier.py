"""Discrete Fourier transforms of tensors that are cut over ranks, by transposes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradmesh.arguments import Call, integer
from gradmesh.axis import Axis, balanced
from gradmesh.collectives import all_to_all
from gradmesh.errors import DTypeError, ShapeError
from gradmesh.nn.fields.cuts import AxesLike, DimsLike, Rows, cuts_of
from gradmesh.nn.fields.lines import Norm, transformed

__all__ = ["fftn", "ifftn", "irfftn", "rfftn"]

_TAKEN = (torch.float32, torch.float64, torch.complex64, torch.complex128)
_NORMS = dict.fromkeys((None, "backward", "ortho", "forward"), 0)
_STEPS = {
    "fftn": ("fft", "fft"),
    "ifftn": ("ifft", "ifft"),
    "rfftn": ("fft", "rfft"),
    "irfftn": ("ifft", "irfft"),
}
"""What each does along the dims but the last, and along the last."""


class _Layout:
    """A tensor, and along which dims it is cut: moved so that a dim becomes whole."""

    def __init__(self, verb: str, x: Tensor, axis: AxesLike, dim: DimsLike, sizes: Rows) -> None:
        self.x, self.verb = x, verb
        self.cuts: dict[int, tuple[Axis, tuple[int, ...]]] = {
            cut.dim: (cut.axis, cut.sizes) for cut in cuts_of(verb, x, axis, dim, sizes)
        }

    def move(self, dim: int, to: int) -> None:
        """Make a dim whole that is cut, and cut another one evenly in its place."""
        axis, sizes = self.cuts.pop(dim)
        parts = balanced(self.x.shape[to], axis.size)
        self.x = all_to_all(self.x, axis, split_dim=to, concat_dim=dim, split_sizes=parts, concat_sizes=sizes)
        self.cuts[to] = axis, parts

    def whole(self, dim: int, wanted: Sequence[int]) -> None:
        """Make a dim whole; what is cut for it is a wanted dim if one is free, else the largest."""
        if dim not in self.cuts:
            return
        free = [other for other in range(self.x.dim()) if other != dim and other not in self.cuts]
        if not free:
            Call(self.verb, self.x, self.cuts[dim][0]).fail(
                "there is no dim to cut in place of the one that is transformed",
                expected="a dim more than there are axes",
                got=f"shape {list(self.x.shape)}, cut along {sorted(self.cuts)}",
                remedy="x.unsqueeze(0) has one, of which the first rank gets all",
                kind=ShapeError,
            )
        best = free[0]
        for other in free[1:]:
            if (other in wanted, self.x.shape[other]) > (best in wanted, self.x.shape[best]):
                best = other
        self.move(dim, best)

    def restore(self, wanted: dict[Axis, int]) -> None:
        """Cut each axis's dim, evenly; where two are to change places, through a third."""
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
            "dims are named twice, or not one for each axis",
            expected=f"{len(axes)} dims to be cut, and each transformed dim once",
            got=f"out_dim={out!r}, dims={dims!r}",
            remedy="name each dim once",
        )
    if not all(sum(layout.cuts[d][1]) if d in layout.cuts else x.shape[d] for d in places):
        call.fail(
            "a dim without rows has no transform",
            expected="1 or more along each transformed dim, on all ranks together",
            got=f"shape {list(x.shape)}",
            remedy="leave it out of dims",
            kind=ShapeError,
        )
    last, others = places[-1], places[:-1]
    _checked(call, kind, sum(layout.cuts[last][1]) if last in layout.cuts else x.shape[last], n, norm)
    wanted = dict(zip((axis for axis, _ in axes), outs, strict=True))
    inner, outer = _STEPS[kind]
    # Whole dims come first, since they need no transpose; the real one is the first or the last of all.
    order = [d for d in others if d not in layout.cuts] + [d for d in others if d in layout.cuts]
    for place in [*order, last] if kind == "irfftn" else [last, *order]:
        layout.whole(place, outs)
        given = n if place == last else None
        layout.x = transformed(outer if place == last else inner, layout.x, place, given, norm)
    layout.restore(wanted)
    return layout.x


def _checked(call: Call, kind: str, modes: int, n: int | None, norm: Norm) -> None:
    """Refuse on every rank what torch refuses where a rank has elements."""
    call.choose("norm", norm, _NORMS)
    if call.x.dtype not in _TAKEN:
        call.fail(
            "there is no transform of such numbers, of any size",
            expected="float32, float64, or complex numbers of these",
            got=str(call.x.dtype),
            remedy="transform x.float()",
            kind=DTypeError,
        )
    points = 2 * (modes - 1) if n is None else integer(n)
    if kind == "irfftn" and (points is None or points < 1):
        call.fail(
            "the real tensor has no points",
            expected="n of 1 or more; or more than one mode, of which it is the even size",
            got=f"n={n!r}, {modes} modes",
            remedy="pass the size of the real tensor as n",
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
    """The discrete Fourier transform of a tensor that is cut over ranks: `torch.fft.fftn`.

    ::

        V -> V    (n_r, m, ...) -> (n_r, m, ...)

                  forward: local transforms of the dims that are whole; an `all_to_all`, after which the cut one is
                  whole and another one cut; its transform; and back. Backward: the same ways back.

    Every size will do: where the ranks do not divide it, the first ranks get one row more. The result is cut so along
    `out_dim`, also where the parts that were handed in are others; only a dim that is not transformed, and stays cut,
    keeps its parts.

    Args:
        x: own part, real or complex.
        axis: the ranks; or a tuple of axes, for a pencil: one dim is cut along each.
        dim: the dim that is cut; or one for each axis.
        dims: the dims to transform; None: all.
        out_dim: the dim along which the result is to be cut, or one for each axis; None: `dim`. With another one, the
            transpose back is saved: transform with `out_dim=1`, and back with `dim=1, out_dim=0`.
        sizes: each rank's size along `dim`; as in `gradmesh.nn.HaloConv1d`.
        norm: as in `torch.fft.fftn`.

    Raises:
        ArgumentError: a dim named twice, or not one for each axis; another norm.
        ShapeError: all dims are cut.
        DTypeError: numbers of less than 32 bits.

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
    """The inverse of `fftn`: `torch.fft.ifftn` of a tensor that is cut over ranks; arguments and types as there.

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
    """The Fourier transform of a real tensor that is cut over ranks, half of it along the last dim: `torch.fft.rfftn`.

    ::

        V -> V    (n_r, m) -> (n_r, m // 2 + 1), complex

    Args:
        x: own part, real.
        axis, dim, dims, out_dim, sizes, norm: as in `fftn`. The last of `dims` is the one that is halved.

    Raises:
        ArgumentError, ShapeError, DTypeError: as in `fftn`; and of a complex tensor.

    Example:
        >>> def on_each_rank():
        ...     x = torch.arange(15.0).view(3, 5)
        ...     y = gm.nn.fields.rfftn(x[:, gm.axis().slice(5)], dim=1, sizes=(3, 2))  # the halved dim is cut
        ...     return y.shape[1], torch.allclose(y, torch.fft.rfftn(x)[:, gm.axis().slice(3)], atol=1e-5)
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [(2, True), (1, True)]
    """
    if x.is_complex():
        Call("nn.fields.rfftn", x, axis[0] if isinstance(axis, tuple) else axis).fail(
            "half of a transform is enough for real tensors alone",
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
    """The inverse of `rfftn`: `torch.fft.irfftn` of a tensor that is cut over ranks.

    ::

        V -> V    (n_r, m // 2 + 1) -> (n_r, m), real

    Args:
        x: own part of half of a transform.
        n: the size of the real tensor along the last of `dims`; None: the even one. For an odd one it has to be told.
        axis, dim, dims, out_dim, sizes, norm: as in `fftn`.

    Raises:
        ArgumentError, ShapeError, DTypeError: as in `fftn`; and of a real tensor without points.

    Example:
        >>> def on_each_rank():
        ...     x = torch.rand(2, 5)
        ...     return torch.allclose(gm.nn.fields.irfftn(gm.nn.fields.rfftn(x), n=5), x, atol=1e-6)
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [True, True]
    """
    return _transformed("irfftn", x, axis, dim, dims, out_dim, sizes, norm, n)
