"""Random Fourier transforms of tensors that are cut over ranks: what the tests attack."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import gradmesh as gm
from tests.field_programs import dense_slopes, far, slopes

KINDS = ("fftn", "ifftn", "rfftn", "irfftn")


@dataclass(frozen=True)
class Program:
    """A transform.

    Attributes:
        kind: which one.
        seed: of the values.
        shape: of the whole tensor.
        parts: each rank's rows along `dim`.
        dim, dims, out_dim, norm: as the functions take them.
        n: the size of the last real dim.
        real: whether the tensor is real.
        idle: a rank whose loss leaves its rows out; -1: there is none.
    """

    kind: str
    seed: int
    shape: tuple[int, ...]
    parts: tuple[int, ...]
    dim: int
    dims: tuple[int, ...] | None
    out_dim: int | None
    norm: Any
    n: int | None
    real: bool
    idle: int


def random_program(seed: int, kind: str) -> tuple[int, Program]:
    """How many ranks, and what they transform."""
    draw = random.Random(seed)
    ranks, number = draw.choice([1, 2, 3, 4]), draw.choice([2, 2, 3])
    shape = [draw.choice([1, 2, 3, 4, 5, 7]) for _ in range(number)]
    parts = tuple(draw.choice([0, 1, 2, 3]) for _ in range(ranks))
    parts = parts if sum(parts) else (*parts[1:], 3)
    dim = draw.randrange(number)
    shape[dim] = sum(parts)
    dims = None
    if draw.random() < 0.7:
        dims = tuple(draw.sample(range(number), draw.randint(1, number)))
    last = number - 1 if dims is None else dims[-1]
    most = 2 * shape[last] - 1
    n = draw.choice([most, most + 1, max(most - 1, 1)]) if kind == "irfftn" else None
    real = kind == "rfftn" or (kind != "irfftn" and draw.random() < 0.3)
    out = draw.choice([None, *range(number)])
    norm = draw.choice([None, "backward", "ortho", "forward"])
    idle = draw.choice([-1, draw.randrange(ranks)]) if ranks > 1 else -1
    return ranks, Program(kind, seed, tuple(shape), parts, dim, dims, out, norm, n, real, idle)


def _loss(y: Tensor) -> Tensor:
    """Of complex values too; with a second derivative, and no symmetry."""
    real = y.real + 2 * y.imag if y.is_complex() else y
    return (real**3).sum() + (y.abs() ** 2).sum()


def deviation(program: Program) -> float:
    """On a rank: the largest of the three."""
    return max(deviations(program))


def deviations(program: Program) -> tuple[float, float, float]:
    """On a rank: how far value, first and second slopes are from torch's own."""
    kind = torch.float64 if program.real else torch.complex128
    draw = torch.Generator().manual_seed(program.seed)
    x = torch.randn(program.shape, generator=draw, dtype=kind).requires_grad_()
    dims = tuple(range(x.dim())) if program.dims is None else program.dims
    torchs: Any = getattr(torch.fft, program.kind)
    if program.n is None:
        y = torchs(x, dim=dims, norm=program.norm)
    else:
        y = torchs(x, [*(x.shape[d] for d in dims[:-1]), program.n], dim=dims, norm=program.norm)
    before, after = (slice(None),) * program.dim, program.dim if program.out_dim is None else program.out_dim
    mine = (*before, gm.axis().slice(program.parts))
    own = x.detach()[mine].requires_grad_()
    options = {"dim": program.dim, "dims": program.dims, "out_dim": program.out_dim, "norm": program.norm}
    if program.n is not None:
        options["n"] = program.n
    with gm.ordered():
        z = getattr(gm.nn.fields, program.kind)(own, sizes=program.parts, **options)
        loss = (own.abs() ** 2).sum() * 0 if gm.rank() == program.idle else (1 + gm.rank()) * _loss(z)
        got = slopes(loss, [own])
    rows = gm.sizes(z, dim=after)
    pieces = y.split(rows, after)
    right = torch.stack(
        [(1 + r) * _loss(p) for r, p in enumerate(pieces) if r != program.idle] or [x.abs().sum() * 0]
    ).sum()
    expected = [slope[mine] for slope in dense_slopes(right, [x])]
    value = far(z.detach(), pieces[gm.rank()].detach())
    first, second = (far(a, b) for a, b in zip(got, expected, strict=True))
    return value, first, second
