"""Layers on fields and graphs that are sharded over ranks, and dense ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn.functional import conv2d, interpolate, max_pool2d

import gradmesh as gm
from gradmesh.nn.graph import GraphPlan
from gradmesh.ops.sizes import balanced
from tools.layers.case import Case

Shapes = list[torch.Size]
Sizes = tuple[int, ...]


def _convolved(shapes: Shapes, sizes: Sizes) -> Callable[..., Tensor]:
    out, channels = shapes[1][:2]
    layer = gm.nn.HaloConv2d(channels, out, 3, padding=1, sizes=sizes, device="meta")
    return lambda x, weight, bias: functional_call(layer, {"weight": weight, "bias": bias}, x)


def _pooled(_: Shapes, sizes: Sizes) -> Callable[..., Tensor]:
    return gm.nn.HaloMaxPool(3, stride=1, padding=1, sizes=sizes)


def _finer(_: Shapes, sizes: Sizes) -> Callable[..., Tensor]:
    rows = sum(sizes)
    return lambda x: gm.nn.fields.interpolate(x, (2 * rows, x.shape[3]), mode="bilinear", sizes=sizes)


def _waves_dense(x: Tensor) -> Tensor:
    return torch.view_as_real(torch.fft.rfftn(x, dim=(1, 0)))


def _waves(_: Shapes, sizes: Sizes) -> Callable[..., Tensor]:
    def layer(x: Tensor) -> Tensor:
        own = gm.nn.fields.rfftn(x, dim=1, dims=(1, 0), sizes=sizes)
        # Its columns are cut evenly, and not as those of x.
        parts = balanced(sum(sizes), len(sizes))
        return gm.all_gather(torch.view_as_real(own), dim=1, dst=gm.I, sizes=parts)

    return layer


def _spectral_dense(x: Tensor, weight: Tensor) -> Tensor:
    modes = torch.view_as_complex(weight)
    kept = torch.fft.rfft(x)[..., : modes.shape[-1]]
    made: Tensor = torch.fft.irfft(torch.einsum("nik,iok->nok", kept, modes), x.shape[-1])
    return made


def _spectral(shapes: Shapes, sizes: Sizes) -> Callable[..., Tensor]:
    channels, out, modes = shapes[1][:3]
    layer = gm.nn.SpectralConv(channels, out, modes, sizes=sizes, device="meta")
    return lambda x, weight: functional_call(layer, {"weight": torch.view_as_complex(weight)}, x)


def _ring(nodes: int) -> Tensor:
    """Edges between the next and to oneself, in both directions."""
    here = torch.arange(nodes)
    return torch.stack((here.repeat(3), torch.cat(((here + 1) % nodes, here, (here - 1) % nodes))))


def _neighbours_dense(x: Tensor) -> Tensor:
    source, target = _ring(len(x))
    return torch.zeros_like(x).index_add(0, target, (x[source] * x[target]).tanh())


def _neighbours(_: list[torch.Size], sizes: tuple[int, ...]) -> Callable[..., Tensor]:
    owner = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    plan = GraphPlan(_ring(sum(sizes)), owner)

    def layer(x: Tensor) -> Tensor:
        rows = plan.exchange(x)
        source, target = plan.edge_index
        return plan.scatter_add((rows[source] * rows[target]).tanh())

    return layer


CASES = [
    Case(
        "HaloConv2d",
        "V -> V",
        lambda n, s: [(1, 2, n, 4 * s), (3, 2, 3, 3), (3,)],
        (2, gm.I, gm.I),
        partial(conv2d, padding=1),
        _convolved,
        2,
    ),
    Case(
        "HaloMaxPool",
        "V -> V",
        lambda n, s: [(1, 2, n, 4 * s)],
        (2,),
        lambda x: max_pool2d(x, 3, 1, 1),
        _pooled,
        2,
    ),
    Case(
        "interpolate, bilinear",
        "V -> V",
        lambda n, s: [(1, 2, n, 4 * s)],
        (2,),
        lambda x: interpolate(x, (2 * x.shape[2], x.shape[3]), mode="bilinear"),
        _finer,
        2,
    ),
    Case(
        "rfftn, gathered",
        "V -> I",
        lambda n, s: [(6 * s, n)],
        (1,),
        _waves_dense,
        _waves,
        gm.I,
    ),
    Case(
        "SpectralConv",
        "V -> V",
        lambda n, s: [(2, s, n), (s, s, 3, 2)],
        (2, gm.I),
        _spectral_dense,
        _spectral,
        2,
        large=(65536, 16),
    ),
    Case(
        "GraphPlan.exchange, scatter_add",
        "V -> V",
        lambda n, s: [(n, 4 * s)],
        (0,),
        _neighbours_dense,
        _neighbours,
        0,
        large=(16384, 16),
    ),
]
