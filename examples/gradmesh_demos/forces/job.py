"""The whole demo: data, training on ranks and on one process, held-out forces, communication, and dynamics."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import gradmesh as gm
from gradmesh.nn.graph import GraphPlan, by_space
from gradmesh_demos.forces import Job, single, structures
from gradmesh_demos.forces.dynamics import Energies, md_on_rank, started
from gradmesh_demos.forces.layers import CUTOFF
from gradmesh_demos.forces.structures import batch_of
from gradmesh_demos.forces.training import Training, deviations, samples_of, trained
from gradmesh_demos.runner import Watcher, one_thread, plain, table, verdict

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.console import Console

__all__ = ["Held", "Result", "Rows", "draw", "print_tables", "run"]

EXACT = 1e-10
"""The largest deviation that counts as rounding in float64."""


@dataclass(frozen=True)
class Rows:
    """The rows that one exchange sends, over all ranks, for a slab."""

    atoms: int  # number of atoms
    sent: int  # rows that are sent
    gathered: int  # rows that an all-gather would send


@dataclass(frozen=True, eq=False)
class Held:
    """Forces on held-out structures."""

    right: Tensor  # of EMT
    predicted: Tensor  # of the model
    family: list[str]  # the kind of structure of each atom
    mean: Tensor  # the mean force of the training data

    def errors(self, family: str | None = None) -> tuple[float, float]:
        """The mean absolute error of the model and of predicting the mean; for one kind of structure, or for all."""
        of = torch.tensor([family in (None, each) for each in self.family])
        own, mean = (float((each - self.right)[of].abs().mean()) for each in (self.predicted, self.mean))
        return own, mean


@dataclass(frozen=True, eq=False)
class Result:
    """The results of the demo."""

    job: Job  # its options
    # for each kind of structure, the number of training and of held-out structures
    families: dict[str, tuple[int, int]]
    training: Training  # training on the ranks
    # of energy, forces, stress and gradient from one process, see `training.deviations`
    deviations: dict[str, float]
    once: float  # the same of the gradient, with exchanges that have no second derivative
    held: Held  # the forces on held-out structures
    rows: list[Rows]  # for slabs of several sizes
    energies: Energies  # of the molecular dynamics
    moving: int  # number of atoms in the molecular dynamics
    seconds: dict[str, float]  # run time of each part

    def as_json(self) -> dict[str, Any]:
        """The results as plain values."""
        error, mean_error = self.held.errors()
        return {
            **vars(self.job),
            "families": self.families,
            **{name: getattr(self.training, name) for name in ("loss_error", "param_error", "rank_error")},
            "deviations": self.deviations,
            "gradient_without_second_derivative": self.once,
            "force_error": error,
            "force_error_of_the_mean": mean_error,
            "force_error_by_family": {family: self.held.errors(family) for family in self.families},
            "rows": [vars(each) for each in self.rows],
            "drift_by_atom": self.energies.drift,
            "neighbour_lists_rebuilt": self.energies.rebuilt,
            "moving": self.moving,
            "losses": self.training.losses,
            "seconds": {name: round(each, 2) for name, each in self.seconds.items()},
        }


def run(job: Job, watcher: Watcher | None = None) -> Result:
    """Run the job."""
    watcher, clock = watcher or Watcher(), _Clock()
    watcher.begin("making structures", 1, only=True)
    made = structures.made(job.structures, job.seed)
    apart = structures.made(max(4, job.structures // 3), job.seed + 1)
    families = {
        family: tuple(sum(atoms.info["family"] == family for atoms in several) for several in (made, apart))
        for family in structures.FAMILIES
    }
    clock.lap("structures")
    with one_thread(), gm.Ranks(job.ranks, backend=job.backend) as ranks:
        training = trained(ranks, made, job, watcher)
        clock.lap("training, on ranks and on one process")
        sample = samples_of(made, job.batch, 1, job.seed)[0]
        far, once = deviations(ranks, training.model, training.dense, sample, job.partition)
        held = _held(training.dense, made, apart)
        clock.lap("comparison")
        rows = [_rows(ranks, job, part, watcher) for part in (64, 16, 4, 1)]
        clock.lap("rows")
        energies, moving = _moved(ranks, training, job, watcher)
        clock.lap("dynamics")
    return Result(
        job,
        families,
        training,
        far,
        once,
        held,
        rows,
        energies,
        moving,
        clock.laps,
    )


class _Clock:
    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._then = time.perf_counter()

    def lap(self, name: str) -> None:
        then, self._then = self._then, time.perf_counter()
        self.laps[name] = self._then - then


def _held(model: single.Potential, made: list[Any], apart: list[Any]) -> Held:
    batch, right = batch_of(apart, CUTOFF)
    names = [atoms.info["family"] for atoms in apart]
    found = single.figures(model, batch)
    mean = batch_of(made, CUTOFF)[1].forces.mean(0, keepdim=True)
    family = [names[each] for each in batch.structure.tolist()]
    return Held(right.forces, found.forces, family, mean)


def _rows(ranks: gm.Ranks, job: Job, part: int, watcher: Watcher) -> Rows:
    what = f"counting rows, 1 / {part}"
    watcher.begin(what, 1, only=True)
    slab = structures.slab(job.atoms // part)
    batch, _ = batch_of([slab], CUTOFF)
    owner = by_space(batch.positions, job.ranks, cell=torch.from_numpy(slab.cell.array))
    found = ranks.run(_rows_on_rank, batch.edges, owner)
    watcher.advance(what)
    return Rows(len(slab), sum(sent for sent, _ in found), sum(whole for _, whole in found))


def _rows_on_rank(edges: Tensor, owner: Tensor) -> tuple[int, int]:
    plan = GraphPlan(edges, owner)
    return plan.rows_sent, plan.rows_of_gather


def _moved(ranks: gm.Ranks, training: Training, job: Job, watcher: Watcher) -> tuple[Energies, int]:
    """Run the molecular dynamics of a slab in several calls, to show the progress."""
    atoms = started(structures.relaxed(structures.slab(job.moving)), job.seed)
    energies, size = Energies(), -(-job.md // 4)
    watcher.begin("dynamics", job.md, only=True)
    for begin in range(0, job.md, size):
        steps = min(size, job.md - begin)
        atoms, found = ranks.run(md_on_rank, training.model, atoms, steps)[0]
        later = slice(1 if begin else 0, None)
        energies.potential += found.potential[later]
        energies.kinetic += found.kinetic[later]
        energies.rebuilt += found.rebuilt
        watcher.advance("dynamics", steps, f"drift {1000 * energies.drift:.3f} meV per atom")
    return energies, len(atoms)


def print_tables(result: Result, console: Console) -> None:
    """Print the results."""
    ranks, training = result.job.ranks, result.training
    errors = table("compared with one process", "largest deviation", "", left=("compared with one process",))
    for name, error in (
        ("training losses", training.loss_error),
        ("parameters after every step", training.param_error),
        ("parameters between ranks", training.rank_error),
        *((f"{name}, trained model", error) for name, error in result.deviations.items()),
        ("gradient, if exchanges had no second derivative", result.once),
    ):
        errors.add_row(name, f"{error:.1e}", verdict(error, EXACT, "correct to rounding", "wrong"))
    console.print(f"\n[bold]{result.job.steps} steps on {ranks} ranks and on one process[/]", errors)

    first = "held-out forces"
    held = table(first, "structures", "error", "of the mean", "share", left=(first,))
    for family in (*result.families, None):
        error, mean = result.held.errors(family)
        number = sum(count for name, (_, count) in result.families.items() if family in (None, name))
        cells = (f"{error:.3f} eV/Å", f"{mean:.3f} eV/Å", f"{error / mean:.0%}" if mean else "-")
        held.add_row(family or "all", str(number), *cells)
    console.print("[bold]Mean absolute error of the forces; of predicting the mean force[/]", held)

    sent = table("slab", "rows sent", "by an all-gather", "share", left=("slab",))
    for rows in result.rows:
        share = f"{rows.sent / rows.gathered:.1%}" if rows.gathered else "-"
        sent.add_row(f"{rows.atoms} atoms", str(rows.sent), str(rows.gathered), share)
    console.print(f"[bold]Rows that one exchange sends on {ranks} ranks[/]", sent)

    energies = result.energies
    console.print(
        f"{len(energies.total) - 1} steps of molecular dynamics of {result.moving} atoms on {ranks} ranks: the energy "
        f"drifts by at most {1000 * energies.drift:.3f} meV per atom, of {1000 * max(energies.kinetic):.1f} meV "
        f"kinetic energy; the neighbour list was rebuilt {energies.rebuilt} times."
    )
    parts = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in result.seconds.items())
    console.print(f"{sum(result.seconds.values()):.0f} s: {parts}.")


def draw(result: Result) -> Figure:
    """Plot the forces, the rows that are sent, and the energies."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 4.6), dpi=150, layout="constrained")
    figure.suptitle(f"Interatomic potential on {result.job.ranks} ranks\n", fontsize=13)
    forces, rows, energies = figure.subplots(1, 3)
    _plot_forces(forces, result)
    _plot_rows(rows, result)
    _plot_energies(energies, result)
    plain(forces, rows, energies)
    for axes in (forces, rows, energies):
        axes.title.set_fontsize(10)  # the longest is as wide as its axes
    return figure


def _plot_forces(axes: Axes, result: Result) -> None:
    held = result.held
    for family in result.families:
        of = [place for place, name in enumerate(held.family) if name == family]
        right, predicted = held.right[of].reshape(-1).numpy(), held.predicted[of].reshape(-1).numpy()
        axes.plot(right, predicted, ".", markersize=4, alpha=0.6, label=family)
    most = float(held.right.abs().max())
    axes.plot([-most, most], [-most, most], color="black", linewidth=0.8)
    error, mean = held.errors()
    axes.set(
        title=f"Held-out forces: error {error:.3f}, predicting the mean: {mean:.3f} eV/Å",
        xlabel="EMT (eV/Å)",
        ylabel="predicted (eV/Å)",
    )
    axes.legend(frameon=False)


def _plot_rows(axes: Axes, result: Result) -> None:
    atoms = [rows.atoms for rows in result.rows]
    axes.loglog(atoms, [rows.gathered for rows in result.rows], "s-", color="#D55E00", label="all-gather")
    axes.loglog(atoms, [rows.sent for rows in result.rows], "o-", color="#0072B2", label="by plan")
    axes.set(title="Rows that one exchange sends", xlabel="atoms of the slab", ylabel="rows, all ranks")
    axes.legend(frameon=False)


def _plot_energies(axes: Axes, result: Result) -> None:
    energies = result.energies
    for name, values in (
        ("potential", energies.potential),
        ("kinetic", energies.kinetic),
        ("total", energies.total),
    ):
        moved = [1000 * (value - values[0]) for value in values]
        axes.plot(moved, label=name, color="black" if name == "total" else None)
    axes.set(
        title=f"Dynamics of {result.moving} atoms: drift {1000 * energies.drift:.3f} meV per atom",
        xlabel="step of 2 fs",
        ylabel="change (meV per atom)",
    )
    axes.legend(frameon=False)
