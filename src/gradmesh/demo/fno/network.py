"""A one-dimensional Fourier neural operator: in plain torch, and with sharded fields."""

from __future__ import annotations

from math import pi
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

import gradmesh as gm
from gradmesh.demo.fno.settings import Job

__all__ = ["Operator", "relative_error"]


class _Spectral(nn.Module):
    """The dense spectral layer, in plain torch."""

    def __init__(self, width: int, modes: int) -> None:
        super().__init__()
        draw = torch.rand(width, width, modes, dtype=torch.complex128)
        self.weight = nn.Parameter(draw / width**2)

    def forward(self, x: Tensor) -> Tensor:
        kept = torch.fft.rfft(x)[..., : self.weight.shape[-1]]
        made: Tensor = torch.fft.irfft(torch.einsum("nik,iok->nok", kept, self.weight), x.shape[-1])
        return made


class Operator(nn.Module):
    """Maps u(x, 0) to u(x, 1), both of shape (n, points).

    Each layer adds a spectral convolution and a convolution of three points. The sharded operator has the state dict of
    the dense one.

    Args:
        job: has width, modes and layers.
        sizes: each rank's number of points; None: dense.
    """

    def __init__(self, job: Job, sizes: tuple[int, ...] | None = None) -> None:
        super().__init__()
        self.sizes, width = sizes, job.width
        where: dict[str, Any] = {} if sizes is None else {"sizes": sizes}
        conv: Any = nn.Conv1d if sizes is None else gm.nn.HaloConv1d
        ring = {"padding": 1, "padding_mode": "circular", "dtype": torch.float64, **where}
        self.enter = conv(3, width, 1, dtype=torch.float64, **where)
        self.near = nn.ModuleList(conv(width, width, 3, **ring) for _ in range(job.layers))
        self.far = nn.ModuleList(
            _Spectral(width, job.modes)
            if sizes is None
            else gm.nn.SpectralConv(width, width, job.modes, sizes=sizes, dtype=torch.float64)
            for _ in range(job.layers)
        )
        self.leave = conv(width, 1, 1, dtype=torch.float64, **where)

    def forward(self, fields: Tensor) -> Tensor:
        """u(x, 1) at the same points."""
        points = fields.shape[-1] if self.sizes is None else sum(self.sizes)
        first = 0 if self.sizes is None else gm.axis().offset(self.sizes)
        places = 2 * pi / points * torch.arange(first, first + fields.shape[-1], dtype=fields.dtype)
        x = torch.stack((fields, *(wave.expand_as(fields) for wave in (places.cos(), places.sin()))), 1)
        x = self.enter(x)
        for near, far in zip(self.near, self.far, strict=True):
            x = x + gelu(near(x) + far(x))
        made: Tensor = fields + self.leave(x).squeeze(1)
        return made


def relative_error(found: Tensor, right: Tensor, parts: bool) -> Tensor:
    """The mean over the fields of |found - right| / |right|, over all points; the same on every rank."""
    squares = torch.stack((((found - right) ** 2).sum(1), (right**2).sum(1)))
    if parts:
        squares = gm.all_reduce(squares, dst=gm.I)
    return (squares[0] / squares[1]).sqrt().mean()
