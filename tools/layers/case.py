"""A layer and its dense counterpart, as functions of the same leaves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import gradmesh as gm
from benchmarks.peak import peak
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


_OPTIONS: dict[str, Any] = {"allow_unused": True, "materialize_grads": True}


def _slopes(
    grad: Callable[..., Sequence[Tensor]], loss: Tensor, leaves: Sequence[Tensor], shares: Sequence[bool]
) -> tuple[list[Tensor], list[Tensor]]:
    """The first slopes, and those of their squares.

    A share of a slope is not squared by itself: the shares are added first, and that sum is the same on every rank.
    """
    first = grad(loss, leaves, create_graph=True, **_OPTIONS)
    whole = [
        gm.all_reduce(slope, dst=gm.I) if share else slope for slope, share in zip(first, shares, strict=True)
    ]
    penalty = torch.stack([(slope**2).sum() for slope in whole]).sum()
    return [slope.detach() for slope in whole], list(grad(penalty, leaves, **_OPTIONS))


def deviations(case: Case, sizes: tuple[int, ...]) -> list[float]:
    """On a rank: how far value, slopes and second slopes are off, relative to the largest of the dense ones."""
    whole = whole_of(case, sum(sizes))
    leaves = [each.clone().requires_grad_() for each in whole]
    y = case.dense(*leaves)
    probe = torch.linspace(0.5, 2.0, y.numel(), dtype=y.dtype).view_as(y)
    right = _slopes(torch.autograd.grad, (probe * y**2).sum(), leaves, [False] * len(leaves))
    own = [each.requires_grad_() for each in parts_of(case, whole, sizes)]
    shares = [lie is gm.R for lie in case.lies]
    with gm.ordered():
        z = layer_of(case, own, sizes)(*own)
        weights = own_part(probe, case.result, sizes)
        loss = (weights * z**2).sum()
        first, second = _slopes(gm.grad, loss, own, shares)
    second = [
        gm.all_reduce(each, dst=gm.I) if share else each for each, share in zip(second, shares, strict=True)
    ]
    far = [_apart([z], [own_part(y, case.result, sizes)])]
    for got, expected in ((first, right[0]), (second, right[1])):
        parts = [own_part(each, lie, sizes) for each, lie in zip(expected, case.lies, strict=True)]
        far.append(_apart(got, parts))
    return far


def _apart(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    worst = 0.0
    for a, b in zip(found, expected, strict=True):
        if a.shape != b.shape:
            return float("inf")
        if b.numel():
            worst = max(worst, float((a - b).detach().abs().max() / b.detach().abs().max().clamp(min=1)))
    return worst


def compiled(case: Case, sizes: tuple[int, ...]) -> float:
    """On a rank: how far the gradients of the layer compiled whole are from those that it has otherwise."""
    own = [each.requires_grad_() for each in parts_of(case, whole_of(case, sum(sizes)), sizes)]

    layer = layer_of(case, own, sizes)

    def loss(*leaves: Tensor) -> Tensor:
        return (layer(*leaves) ** 2).sum()

    expected = torch.autograd.grad(loss(*own), own, **_OPTIONS)
    torch.compiler.reset()
    whole = torch.compile(loss, fullgraph=True, backend="aot_eager")
    return _apart(torch.autograd.grad(whole(*own), own, **_OPTIONS), expected)


def findings(case: Case, ranks: int) -> list[str]:
    """The findings of an audit of the layer as a map of the leaves that are cut; the others are constants."""
    sizes = (2,) * ranks

    def build() -> tuple[Any, tuple[Tensor, ...]]:
        own = parts_of(case, whole_of(case, sum(sizes)), sizes)
        whole = layer_of(case, own, sizes)
        cut = [at for at, lie in enumerate(case.lies) if not isinstance(lie, Type)]

        def layer(*leaves: Tensor) -> Tensor:
            given = list(own)
            for at, leaf in zip(cut, leaves, strict=True):
                given[at] = leaf
            return whole(*given)

        return layer, tuple(own[at].requires_grad_() for at in cut)

    return [finding.kind for finding in gm.verify.audit(build, world_size=ranks).findings]


def megabytes(case: Case) -> float:
    """On a rank that is a process: the peak above what is there when the leaves are, results and gradients in it."""
    torch.set_num_threads(1)
    options: dict[str, Any] = {"allow_unused": True, "materialize_grads": True}
    ranks, (n, s) = gm.world_size(), case.large

    def step(n: int, s: int) -> Any:
        sizes = (n // ranks,) * ranks
        own = [each.requires_grad_() for each in parts_of(case, whole_of(case, n, s, torch.float32), sizes)]

        layer = layer_of(case, own, sizes)

        def run() -> Any:
            y = layer(*own)
            return torch.autograd.grad(y.square().sum(), own, **options)

        return run

    step(ranks * 8, 1)()  # what is loaded and set up once
    return peak(step(n, s), gm.barrier) / 2**20
