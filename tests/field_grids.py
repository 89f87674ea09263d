"""Random layers on fields of which two dims are cut over two axes: what the tests of fields attack."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import gradmesh as gm
from tests.field_programs import KINDS, Program, dense_slopes, draw_options, far, layers, slopes

Parts = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class Grid:
    """A layer, and how its field is cut over the axes "a" and "b".

    Attributes:
        program: the layer and the field.
        dims: the dim of the field that is cut over each axis.
        parts: each rank's rows along it.
        auto: whether they are found by asking.
        strided: whether the local part is not contiguous.
    """

    program: Program
    dims: tuple[int, int]
    parts: Parts
    auto: bool
    strided: bool


def random_grid(seed: int) -> Grid:
    """A mesh, and what its ranks do."""
    draw = random.Random(seed)
    kind = draw.choice([kind for kind in KINDS if kind != "spectral"])  # which takes one cut
    ranks = draw.choice([(2, 2), (1, 3), (3, 1), (2, 1), (1, 2)])
    while True:
        shape = [draw.choice([3, 4, 5]) for _ in range(draw.choice([2, 2, 3]))]
        places = draw.sample(range(len(shape)), 2)
        first, second = (tuple(draw.choice([0, 1, 2, 3, 6]) for _ in range(n)) for n in ranks)
        shape[places[0]], shape[places[1]] = sum(first), sum(second)
        options = draw_options(draw, kind, shape)
        if options is not None:
            break
    idle = draw.choice([-1, draw.randrange(ranks[0] * ranks[1])])
    program = Program(kind, seed, tuple(shape), first, places[0], options, idle)
    dims = (places[0] + 2, places[1] + 2)
    return Grid(program, dims, (first, second), draw.random() < 0.5, draw.random() < 0.3)


def deviation(grid: Grid) -> float:
    """On a rank: how far value, first and second slopes are from the dense layer's."""
    program, ranks = grid.program, tuple(map(len, grid.parts))
    gm.mesh(a=ranks[0], b=ranks[1])
    me = gm.axis("a").rank * ranks[1] + gm.axis("b").rank
    where = {"axis": ("a", "b"), "dim": grid.dims, "sizes": "auto" if grid.auto else grid.parts}
    dense, ours, (right_leaves, own_leaves) = layers(program, where)
    draw = torch.Generator().manual_seed(program.seed + 1)
    x = torch.randn((2, 2, *program.shape), generator=draw, dtype=torch.float64).requires_grad_()
    own = _own(x.detach(), grid, grid.parts).clone(memory_format=torch.contiguous_format)
    own = own.transpose(0, 1).contiguous().transpose(0, 1) if grid.strided else own
    own.requires_grad_()
    with gm.ordered():
        z = ours(own)
        loss = (own**3).sum() * 0 if me == program.idle else (1 + me) * (z**3).sum()
        got = slopes(loss, [own, *own_leaves])
    y = dense(x)
    there: Any = tuple(gm.sizes(z, axis, dim=dim) for axis, dim in zip("ab", grid.dims, strict=True))
    first, second = (
        torch.tensor(range(n)).repeat_interleave(torch.tensor(each))
        for n, each in zip(ranks, there, strict=True)
    )
    number = first.unsqueeze(1) * ranks[1] + second  # of the rank that has an output
    weights = (1.0 + number).double().where(number != program.idle, 0.0)
    if grid.dims[0] > grid.dims[1]:
        weights = weights.T
    weights = weights.reshape([n if d in grid.dims else 1 for d, n in enumerate(y.shape)])
    right = dense_slopes((weights * y**3).sum(), [x, *right_leaves])
    for place in (0, 1 + len(own_leaves)):
        right[place] = _own(right[place], grid, grid.parts)
    return max(far(z.detach(), _own(y.detach(), grid, there)), *map(far, got, right))


def _own(whole: Tensor, grid: Grid, parts: Parts) -> Tensor:
    index: list[Any] = [slice(None)] * whole.dim()
    for axis, dim, each in zip("ab", grid.dims, parts, strict=True):
        index[dim] = gm.axis(axis).slice(each)
    return whole[tuple(index)]
