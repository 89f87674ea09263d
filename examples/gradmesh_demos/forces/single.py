"""A potential for atoms, on one process."""

from __future__ import annotations

import torch
from torch import Tensor

from gradmesh_demos.forces.layers import Parts
from gradmesh_demos.forces.structures import Batch, Figures

__all__ = ["Potential", "figures"]


class Potential(Parts):
    """The energy of atoms by what is near them."""

    def forward(self, batch: Batch, positions: Tensor, strain: Tensor) -> Tensor:
        """The energy of each structure."""
        source, target = batch.edges
        kinds, structure = batch.kinds, batch.structure
        apart = positions[source] + batch.offsets - positions[target]
        apart = apart + (strain[structure[target]] @ apart[:, :, None]).squeeze(2)
        edge = self.edge(apart, batch.kinds[batch.edges])
        x = self.embed[kinds]
        for layer in self.layers:
            messages = layer.messages(x[source], edge)
            sums = messages.new_zeros(len(x), messages.shape[1]).index_add(0, target, messages)
            x = layer.update(x, sums)
        energy = self.atomic(x, kinds)
        return energy.new_zeros(batch.structures).index_add(0, structure, energy)


def figures(model: Potential, batch: Batch, *, second: bool = False) -> Figures:
    """Energies, forces and stresses; with `second`, losses of them can be differentiated."""
    positions = batch.positions.clone().requires_grad_()
    strain = positions.new_zeros(batch.structures, 3, 3).requires_grad_()
    energy = model(batch, positions, strain)
    slope, virial = torch.autograd.grad(energy.sum(), [positions, strain], create_graph=second)
    return Figures(energy, -slope, virial / batch.volumes[:, None, None])
