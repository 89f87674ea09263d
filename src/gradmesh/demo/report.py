"""Progress display, table of gradient errors, and training curves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from gradmesh.demo.contrast import GATHERS
from gradmesh.demo.job import BATCH, HELD_OUT, ONE_PROCESS, Curve, Result, Settings, Watcher

__all__ = ["draw", "print_proof", "shown"]

EXACT = 1e-10
"""The largest deviation that counts as rounding in float64."""


class _Bar(Watcher):
    """Updates the progress bar, and prints a row for each epoch above it."""

    def __init__(self, progress: Progress, settings: Settings) -> None:
        self._progress = progress
        self._epochs = settings.epochs
        self._task = progress.add_task("starting the ranks", total=settings.epochs * len(GATHERS))

    def turn(self, epoch: int) -> None:
        self._progress.update(self._task, advance=1, description=f"epoch {epoch + 1} of {self._epochs}")

    def epoch(self, epoch: int, curves: dict[str, Curve]) -> None:
        if epoch == 0:
            self._print("", *GATHERS)
            self._print("epoch", *["loss  recall@1"] * len(GATHERS), style="dim")
        cells = (f"{curves[gather].loss[-1]:.3f}  {curves[gather].recall[-1]:8.1%}" for gather in GATHERS)
        self._print(str(epoch + 1), *cells)

    def _print(self, epoch: str, *cells: str, style: str | None = None) -> None:
        # Row by row: a live table would only appear at the end of a log file.
        self._progress.console.print(f"{epoch:>5}" + "".join(f"{cell:>20}" for cell in cells), style=style)


@contextmanager
def shown(settings: Settings, console: Console) -> Iterator[Watcher]:
    """Print an introduction, and show the progress."""
    console.print(
        f"Contrastive learning of handwritten digits (left half against right half) on {settings.ranks} ranks, "
        f"{settings.backend} backend, batch size {BATCH}. recall@1: share of the {HELD_OUT} held-out halves whose most "
        f"similar other half is the right one (chance: {1 / HELD_OUT:.1%}).\n"
    )
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        yield _Bar(progress, settings)


def print_proof(result: Result, console: Console) -> None:
    """Print the gradient error of each gather, and the parameter error of gradmesh's training."""
    table = Table(box=SIMPLE_HEAD)
    table.add_column("gather")
    table.add_column("max abs. difference", justify="right")
    table.add_column("relative", justify="right")
    table.add_column("gradient")
    for gather, error in result.grad_error.items():
        exact = error <= EXACT
        share = error / result.largest_grad
        verdict = "[green]correct to rounding[/]" if exact else "[red]wrong[/]"
        table.add_row(gather, f"{error:.1e}", f"{share:.1e}" if exact else f"{share:.0%}", verdict)
    console.print("\n[bold]Parameter gradients, compared with one process[/]", table)
    console.print(
        f"Maximum over all parameters and ranks, for the first batch of {BATCH} images at the initial parameters; "
        f"relative to the largest entry of the gradient.\n\n"
        f"After {result.settings.epochs} epochs with gradmesh, parameters differ from training on one process by at "
        f"most {result.param_error:.1e}, and between ranks by at most {result.rank_error:.1g}."
    )


_COLOURS = {"gradmesh": "#0072B2", "no gradient": "#E69F00", "slice only": "#D55E00"}


def draw(result: Result, path: Path) -> None:
    """Plot the training curves, as PNG."""
    figure = Figure(figsize=(11, 4.8), dpi=150, layout="constrained")
    figure.suptitle(
        f"Contrastive learning on {result.settings.ranks} ranks with three all-gathers\n",
        fontsize=13,
    )
    left, right = figure.subplots(1, 2, gridspec_kw={"wspace": 0.05})
    _plot(left, {name: curve.loss for name, curve in result.curves.items()})
    left.set(title="Loss of the training batches", xlabel="epoch", ylabel="contrastive loss (nats)")
    lines, names = left.get_legend_handles_labels()
    labels = [
        f"{name}: {result.grad_error[name]:.1e}" if name in result.grad_error else name for name in names
    ]
    left.legend(lines, labels, title="all-gather: gradient error", frameon=False, alignment="left")
    _plot(right, {name: [100 * share for share in curve.recall] for name, curve in result.curves.items()})
    right.set(
        title=f"Recall@1 on {HELD_OUT} held-out images", xlabel="epoch", ylabel="other half found first (%)"
    )
    right.axhline(100 / HELD_OUT, color="grey", linewidth=1, linestyle=":")
    right.annotate("chance", (1, 100 / HELD_OUT), (0, 3), textcoords="offset points", color="grey", ha="left")
    right.set_ylim(bottom=0)
    figure.savefig(path, format="png")


def _plot(axes: Axes, curves: dict[str, list[float]]) -> None:
    epochs = range(1, len(curves[ONE_PROCESS]) + 1)
    for gather, colour in _COLOURS.items():
        axes.plot(epochs, curves[gather], color=colour, linewidth=2, marker=".", markersize=4, label=gather)
    # Dots: this curve coincides with gradmesh's.
    axes.plot(epochs, curves[ONE_PROCESS], "o", color="black", markersize=3.5, label="one process, no gather")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
