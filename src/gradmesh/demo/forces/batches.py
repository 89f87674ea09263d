"""Structures as one graph: who is near whom, across the sides of the cells too."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from ase import Atoms
from matscipy.neighbours import neighbour_list
from torch import Tensor

from gradmesh.demo.forces.structures import ELEMENTS

__all__ = ["Batch", "Figures", "batch_of", "neighbours"]

KINDS = {number: kind for kind, number in enumerate(ELEMENTS)}


@dataclass(frozen=True, eq=False)
class Figures:
    """Of a batch, what is computed or what is right.

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
    """Structures as one graph, whole.

    Attributes:
        kinds: the element of each atom, counted in `ELEMENTS`.
        positions: of the atoms.
        structure: which structure each belongs to.
        edges: sources and targets.
        offsets: what is to be added to the position of an edge's source for the image that is meant.
        volumes: of the structures' cells; infinite where there is none, whose stress is then zero.
    """

    kinds: Tensor
    positions: Tensor
    structure: Tensor
    edges: Tensor
    offsets: Tensor
    volumes: Tensor

    def at(self, positions: Tensor) -> Batch:
        """The same with the atoms elsewhere."""
        return dataclasses.replace(self, positions=positions)

    @property
    def structures(self) -> int:
        """How many there are."""
        return len(self.volumes)

    @property
    def sizes(self) -> Tensor:
        """How many atoms each structure has."""
        return torch.bincount(self.structure, minlength=self.structures)


def neighbours(atoms: Atoms, cutoff: float) -> tuple[Tensor, Tensor]:
    """Edges between all that is nearer than the cutoff: an atom and its own image too, and a pair several times.

    Args:
        atoms: a structure.
        cutoff: in A.

    Returns:
        Sources and targets, shape (2, edges), and what is to be added to the source, shape (edges, 3).
    """
    # Of a single atom without a cell matscipy cannot make one.
    box = atoms.cell.complete().array
    source, target, shift = neighbour_list(
        "jiS", cutoff=float(cutoff), positions=atoms.positions, cell=box, pbc=atoms.pbc
    )
    edges = torch.from_numpy(np.stack((source, target)).astype(np.int64))
    return edges, torch.from_numpy(shift @ box)


def batch_of(structures: Sequence[Atoms], cutoff: float) -> tuple[Batch, Figures]:
    """Structures as one graph, and what their calculators say of them; zeros where they have none.

    Args:
        structures: with or without results.
        cutoff: in A.
    """
    sizes = torch.tensor([len(atoms) for atoms in structures])
    graphs = [neighbours(atoms, cutoff) for atoms in structures]
    firsts = sizes.cumsum(0) - sizes
    volumes = [atoms.cell.volume if atoms.cell.rank == 3 else torch.inf for atoms in structures]
    batch = Batch(
        kinds=torch.tensor([KINDS[number] for atoms in structures for number in atoms.numbers.tolist()]),
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


def _matrix(voigt: np.ndarray) -> Tensor:
    """The stress as a matrix; ASE has it as xx, yy, zz, yz, xz, xy."""
    return torch.from_numpy(voigt[[[0, 5, 4], [5, 1, 3], [4, 3, 2]]])
