"""A layer and its dense counterpart, as functions of the same leaves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import gradmesh as gm
from gradmesh.types import Type

Lie = int | Type
"""How a tensor lies on the ranks: cut along a dim (V), or whole, `gm.I`, or `gm.R` with a share of the gradient."""


@dataclass(frozen=True)
class Case:
    """A layer."""

    name: str  # its own
    types: str  # of its operands and its result
    # of the leaves, whole, where there are `n` of what is cut, and other dims are `s` times as long
    shapes: Callable[[int, int], list[tuple[int, ...]]]
    lies: tuple[Lie, ...]  # how each leaf lies
    dense: Callable[..., Tensor]  # the dense layer as a function of the whole leaves
    # makes the layer, a function of a rank's leaves, for leaves of these shapes and for the sizes in which
    # things are cut
    parts: Callable[[list[torch.Size], tuple[int, ...]], Callable[..., Tensor]]
    result: Lie  # how the result lies
    compiles: bool = True  # whether it is to be compiled whole, where all parts are of one size
    large: tuple[int, int] = (4096, 64)  # `n` and `s` where memory is measured


def whole_of(case: Case, n: int, s: int = 1, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """The leaves, whole; the same on every rank."""
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=draw, dtype=dtype) for shape in case.shapes(n, s)]


def parts_of(case: Case, whole: list[Tensor], sizes: tuple[int, ...]) -> list[Tensor]:
    """This rank's leaves."""
    return [own_part(each, lie, sizes).clone() for each, lie in zip(whole, case.lies, strict=True)]


def layer_of(case: Case, own: list[Tensor], sizes: tuple[int, ...]) -> Callable[..., Tensor]:
    """The layer for these leaves of a rank."""
    return case.parts([each.shape for each in own], sizes)


def own_part(whole: Tensor, lie: Lie, sizes: tuple[int, ...]) -> Tensor:
    """This rank's part; of several times `n` along the dim, as many times its size."""
    if isinstance(lie, Type):
        return whole
    times = whole.shape[lie] // max(sum(sizes), 1)
    begin = times * sum(sizes[: gm.rank()])
    return whole.narrow(lie, begin, times * sizes[gm.rank()])
