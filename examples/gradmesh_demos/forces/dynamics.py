"""Molecular dynamics: a calculator of ASE whose model lies on all ranks of an axis, and a run of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from ase import Atoms, units
from ase.calculators.calculator import Calculator, all_changes
from ase.md.verlet import VelocityVerlet
from torch import Tensor

import gradmesh as gm
from gradmesh.nn.graph import GraphPlan, by_space
from gradmesh.nn.inputs import agree
from gradmesh_demos.forces import parallel
from gradmesh_demos.forces.layers import CUTOFF, copied
from gradmesh_demos.forces.structures import batch_of

__all__ = ["Energies", "RankCalculator", "md_on_rank", "started"]

SKIN = 0.3
"""How much further than the cutoff neighbours are listed, in A: until an atom has moved half of that the list holds."""


class RankCalculator(Calculator):  # type: ignore[misc]  # what ASE says of its types is not followed
    """The potential on all ranks of an axis, as ASE's calculators are.

    Every rank makes one, and runs the same program with it. The ranks' positions stay the same to the last bit, since
    energies, forces and stresses are the same on all of them; if they ever were not, the next neighbour list is an
    error on every rank. Atoms without a cell have no stress.

    Args:
        model: the potential, with the same parameters on every rank.

    Attributes:
        plan: of the neighbour list at hand.
        lists: how many neighbour lists were made.
    """

    implemented_properties: ClassVar[list[str]] = ["energy", "forces", "stress"]

    def __init__(self, model: parallel.Potential) -> None:
        super().__init__()
        self.model, self.lists = model, 0
        self.plan: GraphPlan
        self._listed: Atoms | None = None

    def calculate(
        self,
        atoms: Atoms | None = None,
        properties: list[str] | None = None,
        system_changes: list[str] = all_changes,
    ) -> None:
        """Compute what ASE asks for; every rank of the axis is asked."""
        super().calculate(atoms, properties, system_changes)
        now = self.atoms
        batch = self._batch(now)
        found = parallel.figures(self.model, self.plan, batch)
        self.results = {"energy": found.energy.item(), "forces": found.forces.numpy()}
        if now.cell.rank == 3:
            self.results["stress"] = found.stress[0].flatten()[[0, 4, 8, 5, 2, 1]].detach().numpy()

    def _batch(self, now: Atoms) -> Any:
        then = self._listed
        same = then is not None and (
            np.array_equal(then.numbers, now.numbers)
            and np.array_equal(then.pbc, now.pbc)
            and np.array_equal(then.cell.array, now.cell.array)
        )
        if (
            then is None
            or not same
            or np.linalg.norm(now.positions - then.positions, axis=1).max(initial=0) > SKIN / 2
        ):
            _see_that_ranks_agree(now)
            self._listed, self.lists = now.copy(), self.lists + 1
            self._graph, _ = batch_of([now], CUTOFF + SKIN)
            edges = self._graph.edges
            self.plan = self.plan.rebuilt(edges) if same else GraphPlan(edges, _owner(now))
        return self._graph.at(torch.from_numpy(now.positions))


def _see_that_ranks_agree(atoms: Atoms) -> None:
    """Compare the ranks' structures to the last bit: their edges can be the same while they drift apart."""
    bits = (torch.from_numpy(each.copy()).view(torch.int64) for each in (atoms.positions, atoms.cell.array))
    numbers = torch.from_numpy(atoms.numbers.astype(np.int64))
    agree(gm.axis(), "demo.forces.RankCalculator", "atoms", atoms.pbc.astype(int).tolist(), *bits, numbers)


def _owner(atoms: Atoms) -> Tensor:
    cell = torch.from_numpy(atoms.cell.array) if atoms.cell.rank == 3 else None
    return by_space(torch.from_numpy(atoms.positions), gm.world_size(), cell=cell)


@dataclass
class Energies:
    """Along a run, in eV by atom.

    Attributes:
        potential: that of the model.
        kinetic: that of the atoms.
        rebuilt: how often the neighbour list was made anew on the way.
    """

    potential: list[float] = field(default_factory=list)
    kinetic: list[float] = field(default_factory=list)
    rebuilt: int = 0

    @property
    def total(self) -> list[float]:
        """The sum of both, which stays what it is."""
        return [sum(pair) for pair in zip(self.potential, self.kinetic, strict=True)]

    @property
    def drift(self) -> float:
        """The largest difference of the sum from that at the beginning."""
        return max(abs(each - self.total[0]) for each in self.total)


def started(atoms: Atoms, seed: int, kelvin: float = 300.0) -> Atoms:
    """The atoms, moving at random as they do at a temperature."""
    atoms = atoms.copy()
    masses = atoms.get_masses()[:, None]
    momenta = np.random.default_rng(seed).normal(size=(len(atoms), 3)) * np.sqrt(masses * units.kB * kelvin)
    atoms.set_momenta(momenta - masses * momenta.sum(0) / masses.sum())
    return atoms


def md_on_rank(
    model: parallel.Potential, atoms: Atoms, steps: int, femtoseconds: float = 2.0
) -> tuple[Atoms, Energies]:
    """Run so many steps of Verlet's method at constant energy; every rank calls it.

    Args:
        model: the potential.
        atoms: where they are, and how they move.
        steps: how many.
        femtoseconds: the length of a step.

    Returns:
        The atoms at the end, and the energies at the beginning and after each step.
    """
    atoms, found = atoms.copy(), Energies()
    atoms.calc = RankCalculator(copied(model))

    def seen() -> None:
        found.potential.append(float(atoms.get_potential_energy()) / len(atoms))
        found.kinetic.append(float(atoms.get_kinetic_energy()) / len(atoms))

    run = VelocityVerlet(atoms, timestep=femtoseconds * units.fs)
    run.attach(seen)
    run.run(steps)
    found.rebuilt = atoms.calc.lists - 1
    return atoms.copy(), found
