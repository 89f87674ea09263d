"""Progress display, table and plots of both runs."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

from matplotlib.figure import Figure
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from gradmesh.demo import shared
from gradmesh.demo.lm.job import Result
from gradmesh.demo.lm.settings import Job
from gradmesh.demo.shared import ALONE, IN_PARTS, Progressed

__all__ = ["draw", "print_table", "shown"]

EXACT = 1e-10
"""The largest deviation that counts as rounding in float64."""


def shown(job: Job, console: Console) -> AbstractContextManager[Progressed]:
    """Print an introduction, and show the progress."""
    kind = {"threads": "thread ", "shm": "process ", "gloo": "process "}.get(job.backend, "")
    introduction = (
        f"Character-level language model of Python's reference on {job.ranks} {kind}ranks: "
        f"data parallel {job.dp} x sequence parallel {job.sp} x tensor parallel {job.tp}."
    )
    return shared.shown(introduction, job.steps, console)


def print_table(result: Result, console: Console) -> None:
    """Print the losses of both runs and their differences."""
    table = Table(box=SIMPLE_HEAD)
    for name in ("step", IN_PARTS, ALONE, "abs. difference"):
        table.add_column(name, justify="right")
    steps = len(result.losses)
    for step in sorted({0, steps // 4, steps // 2, 3 * steps // 4, steps - 1}):
        values = (result.losses[step], result.right[step])
        table.add_row(str(step + 1), *(f"{value:.6f}" for value in values), f"{result.far[step]:.1e}")
    console.print(table)
    worst = max(*result.far, result.apart)
    verdict = "[green]equal to rounding[/]" if worst <= EXACT else "[red]different[/]"
    console.print(
        f"max abs. difference: losses {max(result.far):.1e}, final parameters {result.apart:.1e}: {verdict}. "
        f"{result.numbers[1]} of {result.numbers[0]} parameters on each rank."
    )


def draw(result: Result, path: Path) -> None:
    """Plot both runs, as PNG."""
    figure = Figure(figsize=(10, 4), dpi=150, layout="constrained")
    losses, far = figure.subplots(1, 2)
    steps = range(1, len(result.losses) + 1)
    losses.plot(steps, result.right, color="black", linewidth=3, alpha=0.3, label=ALONE)
    losses.plot(steps, result.losses, color="#0072B2", label=f"{result.job.ranks} ranks")
    losses.set(title="Loss per character", xlabel="step", ylabel="nats")
    losses.legend(frameon=False)
    far.semilogy(steps, [max(each, 1e-17) for each in result.far], ".-", color="#D55E00")
    far.set(title="Absolute difference of the losses", xlabel="step", ylim=(1e-17, 1e-2))
    for axes in (losses, far):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, format="png")
