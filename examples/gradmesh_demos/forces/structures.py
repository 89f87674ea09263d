"""Structures with energies, forces and stresses by ASE's EMT: made, not downloaded; a seed decides all of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import ase.io
import numpy as np
import torch
from ase import Atoms
from ase.build import add_adsorbate, bulk, fcc100, fcc111
from ase.calculators.emt import EMT
from ase.calculators.singlepoint import SinglePointCalculator
from ase.cluster import Icosahedron, Octahedron
from ase.data import chemical_symbols
from ase.optimize import BFGS
from matscipy.neighbours import neighbour_list
from torch import Tensor

from gradmesh.errors import ArgumentError, message

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


KINDS = {number: kind for kind, number in enumerate(ELEMENTS)}
SYMBOLS = [chemical_symbols[number] for number in ELEMENTS]
NEAREST = 1e-6
"""In A. The direction between coinciding atoms is undefined, and their forces would be NaN."""


@dataclass(frozen=True, eq=False)
class Figures:
    """The properties of a batch, predicted or from the reference calculator.

    Attributes:
        energy: of each structure, eV.
        forces: on each atom, eV/A.
        stress: of each structure, eV/A^3, shape (structures, 3, 3); zeros without a cell.
    """

    energy: Tensor
    forces: Tensor
    stress: Tensor


@dataclass(frozen=True, eq=False)
class Batch:
    """Structures as one graph, not partitioned.

    Attributes:
        kinds: the element of each atom, as an index in `ELEMENTS`.
        positions: of the atoms.
        structure: the index of each atom's structure.
        edges: sources and targets.
        offsets: vector from the position of an edge's source to its periodic image.
        volumes: of the structures' cells; infinite without a cell, so that the stress is zero.
    """

    kinds: Tensor
    positions: Tensor
    structure: Tensor
    edges: Tensor
    offsets: Tensor
    volumes: Tensor

    def at(self, positions: Tensor) -> Batch:
        """The same batch with other positions."""
        return dataclasses.replace(self, positions=positions)

    @property
    def structures(self) -> int:
        """The number of structures."""
        return len(self.volumes)

    @property
    def sizes(self) -> Tensor:
        """The number of atoms of each structure."""
        return torch.bincount(self.structure, minlength=self.structures)


def neighbours(atoms: Atoms, cutoff: float) -> tuple[Tensor, Tensor]:
    """All edges shorter than the cutoff, including periodic images: an atom with its own image, a pair several times.

    Args:
        atoms: a structure.
        cutoff: in A.

    Returns:
        Sources and targets, shape (2, edges), and the offsets of the sources' images, shape (edges, 3).

    Raises:
        ArgumentError: non-finite positions, coinciding atoms, or a periodic cell without volume.
    """
    if not np.isfinite(atoms.positions).all():
        _refuse("non-finite atomic positions", "finite positions", f"{atoms.positions.tolist()}"[:80])
    # matscipy cannot construct a cell for a single atom.
    box = atoms.cell.complete().array
    lengths = np.linalg.norm(atoms.cell.array, axis=1)
    if (
        not lengths[atoms.pbc].all()
        or atoms.cell.complete().volume < 1e-9 * np.linalg.norm(box, axis=1).prod()
    ):
        _refuse(
            "the cell has no volume", "a vector for each periodic direction", f"{atoms.cell}, pbc={atoms.pbc}"
        )
    source, target, shift = neighbour_list(
        "jiS", cutoff=float(cutoff), positions=atoms.positions, cell=box, pbc=atoms.pbc
    )
    edges, offsets = np.stack((source, target)).astype(np.int64), shift @ box
    far = np.linalg.norm(atoms.positions[source] + offsets - atoms.positions[target], axis=1)
    if far.min(initial=1) < NEAREST:
        one, other = edges[:, far.argmin()].tolist()
        _refuse(
            "two atoms have the same position",
            f"at least {NEAREST} A between any two atoms",
            f"{far.min()} A, atoms {other} and {one}",
        )
    return torch.from_numpy(edges), torch.from_numpy(offsets)


def batch_of(structures: Sequence[Atoms], cutoff: float) -> tuple[Batch, Figures]:
    """Structures as one graph, and the results of their calculators; zeros without results.

    Args:
        structures: with or without results.
        cutoff: in A.

    Raises:
        ArgumentError: no structures, or unsupported elements; and as `neighbours`.
    """
    if odd := {symbol for atoms in structures for symbol in atoms.symbols} - set(SYMBOLS):
        _refuse("unsupported elements", f"elements from {', '.join(SYMBOLS)}", ", ".join(sorted(odd)))
    if not structures:
        _refuse("cannot make a batch of zero structures", "at least 1 structure", "none")
    sizes = torch.tensor([len(atoms) for atoms in structures])
    graphs = [neighbours(atoms, cutoff) for atoms in structures]
    firsts = sizes.cumsum(0) - sizes
    volumes = [atoms.cell.volume if atoms.cell.rank == 3 else torch.inf for atoms in structures]
    batch = Batch(
        kinds=torch.tensor(
            [KINDS[number] for atoms in structures for number in atoms.numbers.tolist()], dtype=torch.int64
        ),
        positions=torch.from_numpy(np.concatenate([atoms.positions for atoms in structures])),
        structure=torch.arange(len(sizes)).repeat_interleave(sizes),
        edges=torch.cat([edges + first for (edges, _), first in zip(graphs, firsts, strict=True)], dim=1),
        offsets=torch.cat([offsets for _, offsets in graphs]),
        volumes=torch.tensor(volumes, dtype=torch.float64),
    )
    results = [{} if atoms.calc is None else atoms.calc.results for atoms in structures]
    forces = [
        found.get("forces", np.zeros((len(atoms), 3)))
        for atoms, found in zip(structures, results, strict=True)
    ]
    right = Figures(
        energy=torch.tensor([found.get("energy", 0.0) for found in results], dtype=torch.float64),
        forces=torch.from_numpy(np.concatenate(forces)),
        stress=torch.stack([_matrix(found.get("stress", np.zeros(6))) for found in results]),
    )
    return batch, right


def _refuse(problem: str, expected: str, got: str) -> NoReturn:
    raise ArgumentError(message(problem, op="demo.forces", expected=expected, got=got))


def _matrix(voigt: np.ndarray) -> Tensor:
    """The stress as a matrix; ASE has it as xx, yy, zz, yz, xz, xy."""
    return torch.from_numpy(voigt[[[0, 5, 4], [5, 1, 3], [4, 3, 2]]])
