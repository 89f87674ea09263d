"""The whole job: structures, training beside one process, held-out forces, the rows that travel, and dynamics."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import gradmesh as gm
from gradmesh._util.environment import require
from gradmesh.demo.forces import single, structures
from gradmesh.demo.forces.dynamics import Energies, md_on_rank, started
from gradmesh.demo.forces.layers import CUTOFF
from gradmesh.demo.forces.settings import Settings, Watcher
from gradmesh.demo.forces.structures import batch_of
from gradmesh.demo.forces.training import Training, deviations, samples_of, trained
from gradmesh.demo.job import one_thread
from gradmesh.nn.graph import GraphPlan, by_space

__all__ = ["Held", "Result", "Rows", "run"]


@dataclass(frozen=True)
class Rows:
    """What an exchange of all ranks sends of a slab.

    Attributes:
        atoms: how many it has.
        sent: the rows that are sent.
        gathered: those that a whole gather would send.
    """

    atoms: int
    sent: int
    gathered: int


@dataclass(frozen=True, eq=False)
class Held:
    """Forces on structures that were not trained on.

    Attributes:
        right: those of EMT.
        predicted: the model's.
        family: the kind of structure of each atom.
        mean: the mean of the forces that were trained on.
    """

    right: Tensor
    predicted: Tensor
    family: list[str]
    mean: Tensor

    def errors(self, family: str | None = None) -> tuple[float, float]:
        """The mean absolute error, and that of the mean as prediction; of one kind of structure, or of all."""
        of = torch.tensor([family in (None, each) for each in self.family])
        own, mean = (float((each - self.right)[of].abs().mean()) for each in (self.predicted, self.mean))
        return own, mean


@dataclass(frozen=True, eq=False)
class Result:
    """What the job found.

    Attributes:
        settings: what it was asked.
        families: for each kind of structure, how many are trained on, and how many are held out.
        training: that on the ranks.
        deviations: for energy, forces, stress and gradient, see `comparing.deviations`.
        once: of the gradient by exchanges whose gradient has no second derivative.
        held: the forces on held-out structures.
        rows: of slabs of several sizes.
        energies: of the dynamics.
        moving: how many atoms move in it.
        seconds: how long each part took.
    """

    settings: Settings
    families: dict[str, tuple[int, int]]
    training: Training
    deviations: dict[str, float]
    once: float
    held: Held
    rows: list[Rows]
    energies: Energies
    moving: int
    seconds: dict[str, float]

    def as_json(self) -> dict[str, Any]:
        """The figures as plain values."""
        error, mean_error = self.held.errors()
        return {
            **vars(self.settings),
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


def run(settings: Settings, watcher: Watcher | None = None) -> Result:
    """Do the whole job.

    Raises:
        ArgumentError: the number of ranks or the backend cannot be.
        MissingExtraError: what the extra brings is not installed.
        RankError: a rank failed.
    """
    require("forces", "demo forces")
    watcher, clock = watcher or Watcher(), _Clock()
    watcher.begin("making structures", 1)
    made = structures.made(settings.structures, settings.seed)
    apart = structures.made(max(4, settings.structures // 3), settings.seed + 1)
    families = {
        family: tuple(sum(atoms.info["family"] == family for atoms in several) for several in (made, apart))
        for family in structures.FAMILIES
    }
    clock.lap("structures")
    with one_thread(), gm.Ranks(settings.ranks, backend=settings.backend) as ranks:
        training = trained(ranks, made, settings, watcher)
        clock.lap("training, on ranks and on one process")
        sample = samples_of(made, settings.batch, 1, settings.seed)[0]
        far, once = deviations(ranks, training.model, training.dense, sample, settings.partition)
        held = _held(training.dense, made, apart)
        clock.lap("comparison")
        rows = [_rows(ranks, settings, part, watcher) for part in (64, 16, 4, 1)]
        clock.lap("rows")
        energies, moving = _moved(ranks, training, settings, watcher)
        clock.lap("dynamics")
    return Result(
        settings,
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


def _rows(ranks: gm.Ranks, settings: Settings, part: int, watcher: Watcher) -> Rows:
    watcher.begin("counting rows", 1)
    slab = structures.slab(settings.atoms // part)
    batch, _ = batch_of([slab], CUTOFF)
    owner = by_space(batch.positions, settings.ranks, cell=torch.from_numpy(slab.cell.array))
    found = ranks.run(_rows_on_rank, batch.edges, owner)
    watcher.advance(1)
    return Rows(len(slab), sum(sent for sent, _ in found), sum(whole for _, whole in found))


def _rows_on_rank(edges: Tensor, owner: Tensor) -> tuple[int, int]:
    plan = GraphPlan(edges, owner)
    return plan.rows_sent, plan.rows_of_gather


def _moved(ranks: gm.Ranks, training: Training, settings: Settings, watcher: Watcher) -> tuple[Energies, int]:
    """Energies of the dynamics of a slab, which is handed to the ranks in parts."""
    atoms = started(structures.relaxed(structures.slab(settings.moving)), settings.seed)
    energies, size = Energies(), -(-settings.md // 4)
    watcher.begin("dynamics", settings.md)
    for begin in range(0, settings.md, size):
        steps = min(size, settings.md - begin)
        atoms, found = ranks.run(md_on_rank, training.model, atoms, steps)[0]
        later = slice(1 if begin else 0, None)
        energies.potential += found.potential[later]
        energies.kinetic += found.kinetic[later]
        energies.rebuilt += found.rebuilt
        watcher.advance(steps, f"drift {1000 * energies.drift:.3f} meV by atom")
    return energies, len(atoms)
