"""Batches of structures as one graph, with neighbour lists in periodic cells."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import torch
from ase import Atoms
from ase.data import chemical_symbols
from matscipy.neighbours import neighbour_list
from torch import Tensor

from gradmesh.demo.forces.structures import ELEMENTS
from gradmesh.errors import ArgumentError, message

__all__ = ["Batch", "Figures", "batch_of", "neighbours"]

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
