"""What the job shows: a progress bar, the tables, and the picture."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from gradmesh.demo.forces.job import Result
from gradmesh.demo.forces.settings import Settings, Watcher

__all__ = ["draw", "print_tables", "shown"]

EXACT = 1e-10
"""The largest deviation that counts as rounding in float64."""


class _Bar(Watcher):
    """A bar for each part of the job."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("starting", total=None)

    def begin(self, what: str, steps: int) -> None:
        self._what = what
        self._progress.reset(self._task, total=steps, description=what)

    def advance(self, steps: int, what: str = "") -> None:
        self._progress.update(self._task, advance=steps, description=f"{self._what} {what}")


@contextmanager
def shown(settings: Settings, console: Console) -> Iterator[Watcher]:
    """Introduce the job, and show on the console how far it is."""
    cut = "each is cut" if settings.partition == "space" else "each is whole on one of them"
    console.print(
        f"A potential for atoms, trained on energies, forces and stresses of ASE's EMT, over {settings.ranks} ranks on "
        f"{settings.backend}: {settings.structures} structures in batches of {settings.batch}; {cut}.\n"
    )
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        yield _Bar(progress)


def print_tables(result: Result, console: Console) -> None:
    """Print what was found."""
    ranks, training = result.settings.ranks, result.training
    table = _table("against one process", "largest deviation", "")
    for name, error in (
        ("losses of training", training.loss_error),
        ("parameters, after every step", training.param_error),
        ("parameters, between ranks", training.rank_error),
        *((f"{name}, trained", error) for name, error in result.deviations.items()),
        ("gradient, if exchanges had no second derivative", result.once),
    ):
        verdict = "[green]right to rounding[/]" if error <= EXACT else "[red]wrong[/]"
        table.add_row(name, f"{error:.1e}", verdict)
    console.print(f"\n[bold]{result.settings.steps} steps on {ranks} ranks and on one process[/]", table)

    table = _table("forces held out", "structures", "error", "of the mean", "share")
    for family in (*result.families, None):
        error, mean = result.held.errors(family)
        number = sum(held for name, (_, held) in result.families.items() if family in (None, name))
        cells = (f"{error:.3f} eV/Å", f"{mean:.3f} eV/Å", f"{error / mean:.0%}" if mean else "-")
        table.add_row(family or "all", str(number), *cells)
    console.print(
        "[bold]Mean absolute error of the forces, beside that of the mean force as prediction[/]", table
    )

    table = _table("slab of", "rows sent", "by a whole gather", "share")
    for rows in result.rows:
        share = f"{rows.sent / rows.gathered:.1%}" if rows.gathered else "-"
        table.add_row(f"{rows.atoms} atoms", str(rows.sent), str(rows.gathered), share)
    console.print(f"[bold]What an exchange sends on {ranks} ranks[/]", table)

    energies = result.energies
    console.print(
        f"{len(energies.total) - 1} steps of dynamics of {result.moving} atoms on {ranks} ranks: the energy drifts by "
        f"{1000 * energies.drift:.3f} meV by atom at most, of {1000 * max(energies.kinetic):.1f} meV of motion; "
        f"the neighbour list was made anew {energies.rebuilt} times."
    )
    parts = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in result.seconds.items())
    console.print(f"{sum(result.seconds.values()):.0f} s: {parts}.")


def _table(first: str, *others: str) -> Table:
    table = Table(box=SIMPLE_HEAD)
    table.add_column(first)
    for name in others:
        table.add_column(name, justify="right")
    return table


def draw(result: Result, path: Path) -> None:
    """Write the picture, as PNG."""
    figure = Figure(figsize=(14, 4.6), dpi=150, layout="constrained")
    figure.suptitle(f"A potential for atoms on {result.settings.ranks} ranks\n", fontsize=13)
    forces, rows, energies = figure.subplots(1, 3)
    _forces(forces, result)
    _rows(rows, result)
    _energies(energies, result)
    for axes in (forces, rows, energies):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, format="png")


def _forces(axes: Axes, result: Result) -> None:
    held = result.held
    for family in result.families:
        of = [place for place, name in enumerate(held.family) if name == family]
        right, predicted = held.right[of].reshape(-1).numpy(), held.predicted[of].reshape(-1).numpy()
        axes.plot(right, predicted, ".", markersize=4, alpha=0.6, label=family)
    most = float(held.right.abs().max())
    axes.plot([-most, most], [-most, most], color="black", linewidth=0.8)
    error, mean = held.errors()
    axes.set(
        title=f"Forces held out: error {error:.3f}, the mean's {mean:.3f} eV/Å",
        xlabel="EMT (eV/Å)",
        ylabel="predicted (eV/Å)",
    )
    axes.legend(frameon=False)


def _rows(axes: Axes, result: Result) -> None:
    atoms = [rows.atoms for rows in result.rows]
    axes.loglog(atoms, [rows.gathered for rows in result.rows], "s-", color="#D55E00", label="whole gather")
    axes.loglog(atoms, [rows.sent for rows in result.rows], "o-", color="#0072B2", label="by plan")
    axes.set(title="Rows that an exchange sends", xlabel="atoms of a slab", ylabel="rows, all ranks")
    axes.legend(frameon=False)


def _energies(axes: Axes, result: Result) -> None:
    energies = result.energies
    for name, values in (
        ("potential", energies.potential),
        ("kinetic", energies.kinetic),
        ("total", energies.total),
    ):
        moved = [1000 * (value - values[0]) for value in values]
        axes.plot(moved, label=name, color="black" if name == "total" else None)
    axes.set(
        title=f"Dynamics of {result.moving} atoms: drift {1000 * energies.drift:.3f} meV by atom",
        xlabel="step of 2 fs",
        ylabel="change (meV by atom)",
    )
    axes.legend(frameon=False)
