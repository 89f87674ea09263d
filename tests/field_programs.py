"""Random layers on fields, dense and cut over ranks: what the tests of fields attack."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import gradmesh as gm

fields = gm.nn.fields
CONVOLUTIONS: dict[tuple[str, int], tuple[type[nn.Module], type[nn.Module]]] = {
    ("conv", 1): (nn.Conv1d, gm.nn.HaloConv1d),
    ("conv", 2): (nn.Conv2d, gm.nn.HaloConv2d),
    ("conv", 3): (nn.Conv3d, gm.nn.HaloConv3d),
    ("transposed", 1): (nn.ConvTranspose1d, gm.nn.HaloConvTranspose1d),
    ("transposed", 2): (nn.ConvTranspose2d, gm.nn.HaloConvTranspose2d),
    ("transposed", 3): (nn.ConvTranspose3d, gm.nn.HaloConvTranspose3d),
}
KINDS = ("conv", "transposed", "max_pool", "avg_pool", "interpolate", "spectral")


@dataclass(frozen=True)
class Program:
    """A layer, a field, and how it is cut.

    Attributes:
        kind: which layer.
        seed: of the values.
        shape: of the field's spatial dims.
        parts: each rank's rows.
        place: the spatial dim that is cut.
        options: of the layer.
        idle: a rank whose loss leaves its rows out; -1: there is none.
        auto: whether the rows are found by asking.
    """

    kind: str
    seed: int
    shape: tuple[int, ...]
    parts: tuple[int, ...]
    place: int
    options: dict[str, Any] = field(default_factory=dict)
    idle: int = -1
    auto: bool = False


def random_program(seed: int, kind: str | None = None) -> tuple[int, Program]:
    """How many ranks, and what they do."""
    draw = random.Random(seed)
    kind = kind or draw.choice(KINDS)
    ranks, dims = draw.choice([1, 2, 3, 4]), draw.choice([1, 1, 2, 2, 3])
    while True:
        parts = tuple(draw.choice([0, 1, 2, 3, 6]) for _ in range(ranks))
        shape = [draw.choice([3, 4, 5]) for _ in range(dims)]
        place = draw.randrange(dims)
        shape[place] = sum(parts)
        options = draw_options(draw, kind, shape)
        if options is not None:
            break
    idle = draw.choice([-1, draw.randrange(ranks)]) if ranks > 1 else -1
    return ranks, Program(kind, seed, tuple(shape), parts, place, options, idle, draw.random() < 0.5)


def draw_options(draw: random.Random, kind: str, shape: Sequence[int]) -> dict[str, Any] | None:
    """Options under which the dense layer takes such a field; None: this draw has none."""
    if min(shape) == 0:
        return None
    kernel = [draw.choice([1, 2, 3, 4]) for _ in shape]
    stride = [draw.choice([1, 1, 2, 3]) for _ in shape]
    dilation = [draw.choice([1, 1, 2]) for _ in shape]
    reach = [d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True)]
    options: dict[str, Any]
    if kind == "conv":
        mode = draw.choice(["zeros", "circular", "reflect", "replicate"])
        padding: Any = [draw.choice([0, 1, 2, 3]) for _ in shape]
        options = {"kernel_size": kernel, "stride": stride, "dilation": dilation, "padding": padding}
        options |= {"padding_mode": mode, "groups": draw.choice([1, 2]), "bias": draw.random() < 0.7}
        if draw.random() < 0.3:
            options |= {"padding": "same", "stride": 1}
            padding = [r // 2 for r in reach]
        if mode in ("circular", "reflect") and any(
            p + (mode == "reflect") > n for p, n in zip(padding, shape, strict=True)
        ):
            return None
        if any(n + 2 * p < r for n, p, r in zip(shape, padding, reach, strict=True)):
            return None
        return options
    if kind == "transposed":
        out = [draw.randrange(max(s, d)) for s, d in zip(stride, dilation, strict=True)]
        padding = [draw.choice([0, 1, 2]) for _ in shape]
        options = {"kernel_size": kernel, "stride": stride, "dilation": dilation, "padding": padding}
        options |= {"output_padding": out, "groups": draw.choice([1, 2]), "bias": draw.random() < 0.7}
        whole = [
            (n - 1) * s - 2 * p + r + o
            for n, s, p, r, o in zip(shape, stride, padding, reach, out, strict=True)
        ]
        return options if min(whole) > 0 else None
    if kind in ("max_pool", "avg_pool"):
        padding = [draw.randrange(k // 2 + 1) for k in kernel]
        options = {
            "kernel_size": kernel,
            "stride": stride,
            "padding": padding,
            "ceil_mode": draw.random() < 0.5,
        }
        if kind == "max_pool":
            options["dilation"] = dilation
            if any(n < d for n, d in zip(shape, dilation, strict=True)):
                return None  # a window that has no row is -inf, and its cube's slope is none
        else:
            options["count_include_pad"], reach = draw.random() < 0.5, kernel
            if len(shape) == 3 and any(n < k for n, k in zip(shape, kernel, strict=True)):
                return None  # which torch's own refuses, whatever the padding
        if any(n + 2 * p < r for n, p, r in zip(shape, padding, reach, strict=True)):
            return None
        return options
    if kind == "interpolate":
        mode = draw.choice(["nearest", "nearest-exact", ("linear", "bilinear", "trilinear")[len(shape) - 1]])
        options = {"mode": mode, "align_corners": draw.choice([True, False]) if "linear" in mode else None}
        if draw.random() < 0.5:
            return options | {"size": [draw.choice([1, 2, 5, 7, 11]) for _ in shape]}
        scales = [draw.choice([0.5, 0.7, 1.0, 1.5, 2.0, 2.3]) for _ in shape]
        points = [int(n * scale) for n, scale in zip(shape, scales, strict=True)]
        # Where there are twice as many points torch takes the factor for 2 in backward of "nearest", and not forward.
        odd = any(m == 2 * n and s != 2 for m, n, s in zip(points, shape, scales, strict=True))
        return None if 0 in points or (odd and mode == "nearest") else options | {"scale_factor": scales}
    modes = [draw.choice([1, 2]) for _ in shape[:-1]] + [draw.choice([1, 2, 3])]
    room = [n // 2 for n in shape[:-1]] + [shape[-1] // 2 + 1]
    return {"modes": modes} if all(m <= r for m, r in zip(modes, room, strict=True)) else None


def layers(
    program: Program, cut: dict[str, Any] | None = None
) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor], list[Any]]:
    """The dense one, that of a rank, and both modules where they have parameters.

    Args:
        program: which.
        cut: how the field is cut; None: as the program says.
    """
    where = cut or {"dim": program.place + 2, "sizes": "auto" if program.auto else program.parts}
    options, dims = program.options, len(program.shape)
    draw = torch.Generator().manual_seed(program.seed)
    if program.kind == "spectral":
        ours: Any = gm.nn.SpectralConv(2, 3, options["modes"], **where, dtype=torch.float64)
        with torch.no_grad():
            ours.weight.copy_(torch.randn(ours.weight.shape, generator=draw, dtype=torch.complex128))
        weight = nn.Parameter(ours.weight.detach().clone())
        return (
            lambda x: dense_spectral(x, weight, options["modes"]),
            ours,
            [[weight], list(ours.parameters())],
        )
    if (program.kind, dims) in CONVOLUTIONS:
        dense_kind, our_kind = CONVOLUTIONS[program.kind, dims]
        dense: Any = dense_kind(2, 4, **options).double()
        ours = our_kind(2, 4, **options, **where).double()
        with torch.no_grad():
            for parameter in dense.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=draw, dtype=torch.float64))
        ours.load_state_dict(dense.state_dict())
        return dense, ours, [list(dense.parameters()), list(ours.parameters())]
    if program.kind == "interpolate":
        return (
            lambda x: functional.interpolate(x, **options),
            lambda x: fields.interpolate(x, **options, **where),
            [[], []],
        )
    torchs: Any = getattr(functional, f"{program.kind}{dims}d")
    made: Any = getattr(fields, program.kind)
    return lambda x: torchs(x, **options), lambda x: made(x, **options, **where), [[], []]


def dense_spectral(x: Tensor, weight: Tensor, modes: Sequence[int]) -> Tensor:
    """The spectral convolution by whole transforms."""
    dims = list(range(2, x.dim()))
    y = torch.fft.rfftn(x, dim=dims)
    kept = torch.zeros((len(x), weight.shape[1], *y.shape[2:]), dtype=y.dtype)
    index: list[Any] = [
        torch.cat((torch.arange(m), torch.arange(n - m, n)))
        for m, n in zip(modes[:-1], x.shape[2:-1], strict=True)
    ]
    index.append(torch.arange(modes[-1]))
    grid = torch.meshgrid(*index, indexing="ij")
    where: Any = (slice(None), slice(None), *grid)
    kept[where] = torch.einsum("ni...,io...->no...", y[where], weight)
    return torch.fft.irfftn(kept, x.shape[2:], dim=dims)


def slopes(
    loss: Tensor, leaves: list[Tensor], grad: Callable[..., tuple[Tensor, ...]] = gm.grad
) -> list[Tensor]:
    """The first slopes and those of their squares."""
    first = grad(loss, leaves, create_graph=True)
    penalty = torch.stack([(slope.abs() ** 2).sum() for slope in first]).sum()
    return [*(slope.detach() for slope in first), *grad(penalty, leaves)]


def dense_slopes(loss: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    """The same, of what no rank has a part in."""
    return slopes(loss, leaves, torch.autograd.grad)


def far(got: Tensor, right: Tensor) -> float:
    """The largest difference, relative to the largest value where that is above 1."""
    assert got.shape == right.shape, (got.shape, right.shape)
    return float((got - right).abs().max() / right.abs().max().clamp(min=1)) if right.numel() else 0.0


def deviation(program: Program) -> float:
    """On a rank: the largest of the three."""
    return max(deviations(program))


def deviations(program: Program) -> tuple[float, float, float]:
    """On a rank: how far value, first and second slopes are from the dense layer's."""
    dim, rank = program.place + 2, gm.rank()
    draw = torch.Generator().manual_seed(program.seed + 1)
    x = torch.randn((2, 2, *program.shape), generator=draw, dtype=torch.float64).requires_grad_()
    dense, ours, (right_leaves, own_leaves) = layers(program)
    own = x.detach()[(slice(None),) * dim + (gm.axis().slice(program.parts),)].requires_grad_()
    with gm.ordered():
        z = ours(own)
        loss = (own**3).sum() * 0 if rank == program.idle else (1 + rank) * (z**3).sum()
        got = slopes(loss, [own, *own_leaves])
    y = dense(x)
    rows = gm.sizes(z, dim=dim)
    assert sum(rows) == y.shape[dim], (rows, y.shape)
    weights = torch.cat([torch.full((n,), (1.0 + r) * (r != program.idle)) for r, n in enumerate(rows)])
    weights = weights.double().view([-1 if d == dim else 1 for d in range(y.dim())])
    right = dense_slopes((weights * y**3).sum(), [x, *right_leaves])
    cut = (slice(None),) * dim
    mine = (*cut, gm.axis().slice(program.parts))
    half = 1 + len(own_leaves)
    right[0], right[half] = right[0][mine], right[half][mine]
    value = far(z.detach(), y.detach()[(*cut, gm.axis().slice(rows))])
    each = [far(a, b) for a, b in zip(got, right, strict=True)]
    return value, max(each[:half]), max(each[half:])
