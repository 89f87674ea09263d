"""Progress display, table and plots of both runs."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

from matplotlib.figure import Figure
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from gradmesh.demo import shared
from gradmesh.demo.fno.job import Result
from gradmesh.demo.fno.settings import Job
from gradmesh.demo.shared import ALONE, IN_PARTS, Progressed
from gradmesh.ops.sizes import balanced

__all__ = ["draw", "print_table", "shown"]

EXACT = 1e-9
"""The largest deviation that counts as rounding in float64, after many steps."""


def shown(job: Job, console: Console) -> AbstractContextManager[Progressed]:
    """Print an introduction, and show the progress."""
    introduction = (
        f"Fourier neural operator for Burgers' equation, {job.points} grid points, {job.samples} training solutions: "
        f"fields sharded over {job.ranks} ranks ({job.backend}), compared with one process."
    )
    return shared.shown(introduction, job.epochs, console)


def print_table(result: Result, console: Console) -> None:
    """Print the losses of both runs and their differences."""
    table = Table(box=SIMPLE_HEAD)
    for name in ("epoch", IN_PARTS, ALONE, "abs. difference", "held-out error"):
        table.add_column(name, justify="right")
    epochs = len(result.held_out)
    each = len(result.losses) // epochs
    for epoch in sorted({0, epochs // 4, epochs // 2, 3 * epochs // 4, epochs - 1}):
        last = (epoch + 1) * each - 1
        values = (f"{result.losses[last]:.6f}", f"{result.right[last]:.6f}", f"{result.far[last]:.1e}")
        table.add_row(str(epoch + 1), *values, f"{result.held_out[epoch]:.1%}")
    console.print(table)
    worst = max(*result.far, result.slope, result.apart)
    verdict = "[green]equal to rounding[/]" if worst <= EXACT else "[red]different[/]"
    console.print(
        f"max difference: first gradient {result.slope:.1e} (relative), losses of all {len(result.losses)} steps "
        f"{max(result.far):.1e}, final parameters {result.apart:.1e}: {verdict}.\nError on {result.job.held_out} "
        f"held-out solutions: {result.held_out[-1]:.1%}; of the linear equation: {result.baseline:.1%}."
    )


def draw(result: Result, path: Path) -> None:
    """Plot a field and both runs, as PNG."""
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
    steps = range(1, len(result.losses) + 1)
    losses.semilogy(steps, result.right, color="black", linewidth=3, alpha=0.3, label=ALONE)
    losses.semilogy(steps, result.losses, color="#0072B2", linewidth=1, label=f"{result.job.ranks} ranks")
    losses.set(title="Relative error in training", xlabel="step")
    losses.legend(frameon=False)
    far.semilogy(steps, [max(each, 1e-17) for each in result.far], ".", color="#D55E00", markersize=3)
    far.set(title="Absolute difference of the losses", xlabel="step", ylim=(1e-17, 1e-2))
    for axes in (field, losses, far):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, format="png")
