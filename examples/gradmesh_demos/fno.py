"""Train the operator on ranks and on one process, with the same data in the same order, and compare."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from math import pi
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

import gradmesh as gm
from gradmesh.ops.sizes import balanced
from gradmesh_demos.runner import (
    ALONE,
    BACKEND,
    ON_RANKS,
    RANKS,
    SEED,
    Watcher,
    difference,
    draw_losses,
    one_thread,
    option,
    plain,
    seeded,
    some_steps,
    table,
    verdict,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console

NEEDS = "demo"
PICTURE = "fno"
SHORT = "Domain decomposition: a Fourier neural operator."
HELP = (
    "Train a Fourier neural operator on solutions of Burgers' equation, with each field sharded over the ranks, and "
    "compare with one process, step by step."
)
EXACT = 1e-9
"""The largest deviation that counts as rounding in float64, after many steps."""


@dataclass(frozen=True)
class Job:
    """Options of the command line, and the network."""

    ranks: int = option(4, RANKS, 1)
    backend: str = option("threads", BACKEND)
    epochs: int = option(30, "Passes over the training solutions.", 1)
    points: int = option(126, "Grid points; need not be divisible by the number of ranks.", 8)
    samples: int = option(96, "Number of training solutions.", 1)
    held_out: int = 32  # number of test solutions
    batch: int = 16  # solutions per step
    width: int = 12  # channels of the network
    modes: int = 12  # kept by its spectral layers
    layers: int = 3  # number of layers
    seed: int = option(0, SEED, 0)


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
    r"""u(x, 1) of u_t + u u_x = nu u_xx on a circle of length 1, from u(x, 0), shape (number, points).

    In Fourier space, the viscous term is integrated exactly and the nonlinear term by the classical Runge-Kutta method,
    with the 2/3 rule against aliasing. Source: Canuto et al., Spectral methods in fluid dynamics (1988).
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


RATE = 0.006


@dataclass(frozen=True)
class Step:
    """The state after an epoch."""

    losses: list[float]  # of its steps
    held_out: float  # the error on the held-out solutions
    operator: Operator  # the operator


@dataclass(frozen=True)
class Result:
    """The results of the job."""

    job: Job
    losses: list[float]  # of each step, on ranks
    right: list[float]  # the same on one process
    held_out: list[float]  # after each epoch, the error on held-out solutions, on ranks
    # the difference of the first gradient from that on one process, relative to its largest entry
    slope: float
    apart: float  # the largest absolute difference of a parameter after training
    baseline: float  # the held-out error of the linear equation
    picture: tuple[Tensor, Tensor, Tensor]  # a held-out field, its solution, and the operator's prediction
    seconds: float  # run time

    @property
    def far(self) -> list[float]:
        """The absolute difference of the losses, step by step."""
        return [abs(a - b) for a, b in zip(self.losses, self.right, strict=True)]

    def as_json(self) -> dict[str, Any]:
        """The results as plain values."""
        return {
            "losses": self.losses,
            "held_out": self.held_out,
            "baseline": self.baseline,
            "gradient_error": self.slope,
            "loss_error": max(self.far),
            "param_error": self.apart,
            **vars(self.job),
            "seconds": round(self.seconds, 2),
        }


def data_of(job: Job) -> tuple[Tensor, Tensor]:
    """Fields and their solutions, held-out ones last."""
    fields = initial_fields(job.samples + job.held_out, job.points, job.seed)
    return fields, solved(fields)


def dense_operator(job: Job) -> Operator:
    """The initial operator."""
    with seeded(job.seed):
        return Operator(job)


def train(job: Job, fields: Tensor, solutions: Tensor, start: dict[str, Any], parts: bool) -> Iterator[Step]:
    """Train, and yield the state after each epoch; with `parts`, on ranks. The fields are not sharded yet."""
    sizes = balanced(job.points, gm.world_size()) if parts else None
    local = gm.axis().slice(sizes) if sizes else slice(None)
    with seeded(job.seed):
        operator = Operator(job, sizes)
    operator.load_state_dict(start)
    fields, solutions = fields[:, local], solutions[:, local]
    order = torch.Generator().manual_seed(job.seed)
    adam = torch.optim.Adam(operator.parameters(), lr=RATE)
    for _ in range(job.epochs):
        losses = []
        for batch in torch.randperm(job.samples, generator=order).split(job.batch):
            loss = relative_error(operator(fields[batch]), solutions[batch], parts)
            adam.zero_grad()
            loss.backward()
            adam.step()
            losses.append(float(loss.detach()))
        with torch.no_grad():
            error = relative_error(operator(fields[job.samples :]), solutions[job.samples :], parts)
        yield Step(losses, float(error), operator)


def _on_rank(
    job: Job, fields: Tensor, solutions: Tensor, start: dict[str, Any]
) -> tuple[list[Step], list[Tensor], Tensor]:
    """On a rank: its epochs, its first gradient, and the final prediction of one field, gathered."""
    sizes = balanced(job.points, gm.world_size())
    local = gm.axis().slice(sizes)
    with seeded(job.seed):
        operator = Operator(job, sizes)
    operator.load_state_dict(start)
    loss = relative_error(operator(fields[: job.batch, local]), solutions[: job.batch, local], True)
    first = list(torch.autograd.grad(loss, list(operator.parameters())))
    steps = list(train(job, fields, solutions, start, parts=True))
    with torch.no_grad():
        made = gm.all_gather(steps[-1].operator(fields[-1:, local]), dim=1, sizes=sizes)[0]
    return steps, first, made


def run(job: Job, watcher: Watcher | None = None) -> Result:
    """Run the job."""
    watcher, started = watcher or Watcher(), time.perf_counter()
    for name in (ON_RANKS, ALONE):
        watcher.begin(name, job.epochs)
    with one_thread():
        fields, solutions = data_of(job)
        dense = dense_operator(job)
        start = {name: value.clone() for name, value in dense.state_dict().items()}
        loss = relative_error(dense(fields[: job.batch]), solutions[: job.batch], False)
        slopes = torch.autograd.grad(loss, list(dense.parameters()))
        alone = []
        for step in train(job, fields, solutions, start, parts=False):
            alone.append(step)
            watcher.advance(ALONE)
        given = (job, fields, solutions, start)
        found = gm.launch(_on_rank, job.ranks, backend=job.backend, args=given)
        watcher.advance(ON_RANKS, job.epochs)
    largest = max(float(slope.abs().max()) for slope in slopes)
    state = alone[-1].operator.state_dict()
    steps, held = found[0][0], slice(job.samples, None)
    return Result(
        job,
        [loss for step in steps for loss in step.losses],
        [loss for step in alone for loss in step.losses],
        [step.held_out for step in steps],
        max(difference(first, slopes) for _, first, _ in found) / largest,
        max(difference(each[-1].operator.state_dict().values(), state.values()) for each, _, _ in found),
        float(relative_error(diffused(fields[held]), solutions[held], False)),
        (fields[-1], solutions[-1], found[0][2]),
        time.perf_counter() - started,
    )


def introduction(job: Job) -> str:
    """What the demo does."""
    return (
        f"Fourier neural operator for Burgers' equation, {job.points} grid points, {job.samples} training solutions: "
        f"fields sharded over {job.ranks} ranks ({job.backend}), compared with one process."
    )


def print_tables(result: Result, console: Console) -> None:
    """Print the losses of both runs and their differences."""
    losses = table("epoch", ON_RANKS, ALONE, "abs. difference", "held-out error")
    epochs = len(result.held_out)
    each = len(result.losses) // epochs
    for epoch in some_steps(epochs):
        last = (epoch + 1) * each - 1
        values = (f"{result.losses[last]:.6f}", f"{result.right[last]:.6f}", f"{result.far[last]:.1e}")
        losses.add_row(str(epoch + 1), *values, f"{result.held_out[epoch]:.1%}")
    console.print(losses)
    worst = max(*result.far, result.slope, result.apart)
    judged = verdict(worst, EXACT, "equal to rounding", "different")
    console.print(
        f"max difference: first gradient {result.slope:.1e} (relative), losses of all {len(result.losses)} steps "
        f"{max(result.far):.1e}, final parameters {result.apart:.1e}: {judged}.\nError on {result.job.held_out} "
        f"held-out solutions: {result.held_out[-1]:.1%}; of the linear equation: {result.baseline:.1%}."
    )


def draw(result: Result) -> Figure:
    """Plot a field and both runs."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4), dpi=150, layout="constrained")
    field, losses, far = figure.subplots(1, 3)
    begin, given, right = 0, result.picture[0], result.picture[1]
    places = [n / result.job.points for n in range(result.job.points)]
    field.plot(places, given, ":", color="grey", label="u(x, 0)")
    field.plot(places, right, color="black", linewidth=3, alpha=0.3, label="u(x, 1), solver")
    for rank, size in enumerate(balanced(result.job.points, result.job.ranks)):
        local = slice(begin, begin + size)
        field.plot(places[local], result.picture[2][local], linewidth=1.5, label=f"operator, rank {rank}")
        begin += size
    field.set(title="A held-out field", xlabel="x")
    field.legend(frameon=False, fontsize=7)
    draw_losses(losses, far, result)
    losses.set(title="Relative error in training", xlabel="step", yscale="log")
    plain(field, losses, far)
    return figure
