"""Training data: solutions of Burgers' equation by a spectral method."""

from __future__ import annotations

from math import pi

import torch
from torch import Tensor

__all__ = ["VISCOSITY", "diffused", "initial_fields", "solved"]

VISCOSITY = 0.01
TIME = 1.0


def initial_fields(number: int, points: int, seed: int) -> Tensor:
    """Random smooth periodic fields, shape (number, points).

    Modes are normal with variance proportional to (k^2 + 9)^-2; the mean is 0. Source: Li et al. (arXiv:2010.08895),
    section 5.1, with other constants.
    """
    draw = torch.Generator().manual_seed(seed)
    modes = torch.arange(1, 17, dtype=torch.float64)
    sizes = 9 / (modes**2 + 9)
    waves = torch.randn(number, 2, 16, generator=draw, dtype=torch.float64) * sizes
    angles = 2 * pi * modes.unsqueeze(1) * torch.arange(points, dtype=torch.float64) / points
    return 0.3 * (waves[:, 0] @ angles.cos() + waves[:, 1] @ angles.sin())


def solved(fields: Tensor, steps: int = 400) -> Tensor:
    r"""u(x, 1) of u_t + u u_x = nu u_xx on a circle of length 1, from u(x, 0).

    In Fourier space, the viscous term is integrated exactly and the nonlinear term by the classical Runge-Kutta method,
    with the 2/3 rule against aliasing. Source: Canuto et al., Spectral methods in fluid dynamics (1988).

    Args:
        fields: u(x, 0), shape (number, points).
        steps: number of time steps.
    """
    points = fields.shape[-1]
    k = 2 * pi * torch.arange(points // 2 + 1, dtype=torch.float64)
    step = TIME / steps
    half = torch.exp(-VISCOSITY * k**2 * step / 2)
    kept = torch.arange(points // 2 + 1) <= points // 3

    def nonlinear(u: Tensor) -> Tensor:
        square: Tensor = torch.fft.rfft(torch.fft.irfft(u, points) ** 2)
        return -0.5j * k * square * kept

    u: Tensor = torch.fft.rfft(fields) * kept
    for _ in range(steps):
        a = nonlinear(u)
        b = nonlinear(half * (u + step / 2 * a))
        c = nonlinear(half * u + step / 2 * b)
        d = nonlinear(half**2 * u + step * half * c)
        u = half**2 * u + step / 6 * (half**2 * a + 2 * half * (b + c) + d)
    made: Tensor = torch.fft.irfft(u, points)
    return made


def diffused(fields: Tensor) -> Tensor:
    """u(x, 1) without the nonlinear term u u_x, a baseline."""
    points = fields.shape[-1]
    k = 2 * pi * torch.arange(points // 2 + 1, dtype=torch.float64)
    made: Tensor = torch.fft.irfft(torch.fft.rfft(fields) * torch.exp(-VISCOSITY * k**2 * TIME), points)
    return made
