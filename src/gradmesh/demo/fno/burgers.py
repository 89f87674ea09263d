"""Solutions of Burgers' equation, by a spectral method: the data of the job."""

from __future__ import annotations

from math import pi

import torch
from torch import Tensor

__all__ = ["VISCOSITY", "diffused", "initial_fields", "solved"]

VISCOSITY = 0.01
TIME = 1.0


def initial_fields(number: int, points: int, seed: int) -> Tensor:
    """Smooth periodic fields, drawn at random, shape (number, points).

    Their modes are normal with a variance that falls as (k^2 + 9)^-2; the mean is 0. Source: as in Li et al. (arXiv:
    2010.08895), section 5.1, with other constants.
    """
    draw = torch.Generator().manual_seed(seed)
    modes = torch.arange(1, 17, dtype=torch.float64)
    sizes = 9 / (modes**2 + 9)
    waves = torch.randn(number, 2, 16, generator=draw, dtype=torch.float64) * sizes
    angles = 2 * pi * modes.unsqueeze(1) * torch.arange(points, dtype=torch.float64) / points
    return 0.3 * (waves[:, 0] @ angles.cos() + waves[:, 1] @ angles.sin())


def solved(fields: Tensor, steps: int = 400) -> Tensor:
    r"""u(x, 1) of u_t + u u_x = nu u_xx on a circle of length 1, from u(x, 0).

    In Fourier space the viscous term is integrated exactly, the other one by Runge's and Kutta's four stages, with a
    third of the modes left empty against aliasing. Source: Canuto et al., Spectral methods in fluid dynamics (1988).

    Args:
        fields: u(x, 0), shape (number, points).
        steps: in time.
    """
    points = fields.shape[-1]
    k = 2 * pi * torch.arange(points // 2 + 1, dtype=torch.float64)
    step = TIME / steps
    half = torch.exp(-VISCOSITY * k**2 * step / 2)
    kept = torch.arange(points // 2 + 1) <= points // 3

    def bent(u: Tensor) -> Tensor:
        square: Tensor = torch.fft.rfft(torch.fft.irfft(u, points) ** 2)
        return -0.5j * k * square * kept

    u: Tensor = torch.fft.rfft(fields) * kept
    for _ in range(steps):
        a = bent(u)
        b = bent(half * (u + step / 2 * a))
        c = bent(half * u + step / 2 * b)
        d = bent(half**2 * u + step * half * c)
        u = half**2 * u + step / 6 * (half**2 * a + 2 * half * (b + c) + d)
    made: Tensor = torch.fft.irfft(u, points)
    return made


def diffused(fields: Tensor) -> Tensor:
    """u(x, 1) without the term u u_x: what an operator has to be better than."""
    points = fields.shape[-1]
    k = 2 * pi * torch.arange(points // 2 + 1, dtype=torch.float64)
    made: Tensor = torch.fft.irfft(torch.fft.rfft(fields) * torch.exp(-VISCOSITY * k**2 * TIME), points)
    return made
