"""Structures with energies, forces and stresses by ASE's EMT: made, not downloaded; a seed decides all of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import ase.io
import numpy as np
from ase import Atoms
from ase.build import add_adsorbate, bulk, fcc100, fcc111
from ase.calculators.emt import EMT
from ase.calculators.singlepoint import SinglePointCalculator
from ase.cluster import Icosahedron, Octahedron
from ase.optimize import BFGS

__all__ = ["ELEMENTS", "FAMILIES", "labelled", "made", "relaxed", "slab", "write"]

ELEMENTS = (7, 8, 29, 79)
"""The atomic numbers of N, O, Cu, Au: EMT has parameters for them."""

METALS = ("Cu", "Au")
LATTICE = {"Cu": 3.61, "Au": 4.08}


def _covered(draw: np.random.Generator) -> Atoms:
    """A slab with an adsorbed atom, two of its layers thick or three."""
    metal = str(draw.choice(METALS))
    surface, site = ((fcc111, "fcc"), (fcc100, "hollow"))[int(draw.integers(2))]
    atoms = surface(metal, (2, 2, int(draw.integers(2, 4))), a=LATTICE[metal], vacuum=6.0, periodic=True)
    add_adsorbate(atoms, str(draw.choice(["N", "O"])), 1.2, site)
    return relaxed(atoms)


def _alloy(draw: np.random.Generator) -> Atoms:
    """Two metals mixed at random on the sites of fcc."""
    one, other = (str(metal) for metal in draw.choice(METALS, 2, replace=False))
    share = draw.uniform(0.2, 0.8)
    lattice = (1 - share) * LATTICE[one] + share * LATTICE[other]
    atoms = bulk(one, "fcc", a=lattice, cubic=True).repeat((2, 2, 1))
    atoms.symbols[draw.random(len(atoms)) < share] = other
    return atoms


def _particle(draw: np.random.Generator) -> Atoms:
    """A particle of 13, 19 or 38 atoms, in no cell."""
    metal, shape = str(draw.choice(METALS)), int(draw.integers(3))
    atoms = Icosahedron(metal, 2) if shape == 0 else Octahedron(metal, *((3, 0), (4, 1))[shape - 1])
    atoms = Atoms(atoms.symbols, atoms.positions)
    return relaxed(atoms)


def _strained(draw: np.random.Generator) -> Atoms:
    """The crystal of a metal in a cell of 1 or 4 atoms, whose neighbours are mostly their own images, under strain."""
    metal = str(draw.choice(METALS))
    atoms = bulk(metal, "fcc", a=LATTICE[metal], cubic=bool(draw.integers(2)))
    strain = draw.normal(scale=0.015, size=(3, 3))
    atoms.set_cell(atoms.cell.array @ (np.eye(3) + strain + strain.T), scale_atoms=True)
    return atoms


FAMILIES: dict[str, Callable[[np.random.Generator], Atoms]] = {
    "slab with adsorbate": _covered,
    "alloy": _alloy,
    "nanoparticle": _particle,
    "strained bulk": _strained,
}
"""How each kind of structure is drawn."""


def relaxed(atoms: Atoms) -> Atoms:
    """The atoms near to where EMT has them at rest."""
    atoms = atoms.copy()
    atoms.calc = EMT()
    BFGS(atoms, logfile=None).run(fmax=0.3, steps=40)
    return atoms.copy()


def labelled(atoms: Atoms) -> Atoms:
    """The atoms with what EMT computes for them, kept as ASE keeps it; the stress where there is a cell.

    Args:
        atoms: any of `ELEMENTS`.
    """
    atoms = atoms.copy()
    atoms.calc = EMT()
    found = {"energy": atoms.get_potential_energy(), "forces": atoms.get_forces()}
    if atoms.cell.rank == 3:
        found["stress"] = atoms.get_stress()
    atoms.calc = SinglePointCalculator(atoms, **found)
    return atoms


def made(number: int, seed: int) -> list[Atoms]:
    """Structures of all families in turn, with energies, forces and stresses.

    Args:
        number: how many.
        seed: decides all of them. The first ones are the same whatever the number.
    """
    structures = []
    for place, draw in enumerate(np.random.default_rng(seed).spawn(number)):
        family = list(FAMILIES)[place % len(FAMILIES)]
        atoms = FAMILIES[family](draw)
        atoms.positions += draw.normal(scale=draw.uniform(0.03, 0.12), size=(len(atoms), 3))
        atoms.info = {"family": family}
        structures.append(labelled(atoms))
    return structures


def write(path: Path, number: int, seed: int) -> None:
    """Write structures with their energies, forces and stresses, as extended XYZ."""
    ase.io.write(path, made(number, seed), format="extxyz")


def slab(atoms: int, layers: int = 6) -> Atoms:
    """A slab of copper with an adsorbed oxygen atom, periodic along its surface.

    Args:
        atoms: about how many it is to have.
        layers: how many atoms it is thick.
    """
    side = max(2, round((atoms / layers) ** 0.5))
    made = fcc111("Cu", (side, side, layers), a=LATTICE["Cu"], vacuum=8.0)
    add_adsorbate(made, "O", 1.2, "fcc", offset=side // 2)
    return made
