"""A potential for atoms, on ranks."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import functional_call

import gradmesh as gm
from gradmesh.nn.graph import GraphPlan
from gradmesh_demos.forces.layers import Parts
from gradmesh_demos.forces.structures import Batch, Figures

__all__ = ["Potential", "figures"]


class Potential(Parts):
    """The energy of atoms by what is near them."""

    def forward(self, plan: GraphPlan, batch: Batch, positions: Tensor, strain: Tensor) -> Tensor:
        """The energy of each structure."""
        source, target = plan.edge_index
        kinds, structure = batch.kinds[plan.own], batch.structure[plan.own]
        positions = plan.exchange(plan.take(positions))
        apart = positions[source] + batch.offsets[plan.edges] - positions[target]
        apart = apart + (strain[structure[target]] @ apart[:, :, None]).squeeze(2)
        edge = self.edge(apart, batch.kinds[batch.edges[:, plan.edges]])
        x = self.embed[kinds]
        for layer in self.layers:
            messages = layer.messages(plan.exchange(x)[source], edge)
            sums = plan.scatter_add(messages)
            x = layer.update(x, sums)
        energy = self.atomic(x, kinds)
        return plan.pool(energy, structure, batch.structures)


def figures(model: Potential, plan: GraphPlan, batch: Batch, *, second: bool = False) -> Figures:
    """Energies, forces and stresses; with `second`, losses of them can be differentiated."""
    positions = batch.positions.clone().requires_grad_()
    strain = positions.new_zeros(batch.structures, 3, 3).requires_grad_()
    weights: dict[str, Tensor] = dict(model.named_parameters())
    shared, weights = gm.replicate((strain, weights))
    energy = functional_call(model, weights, (plan, batch, positions, shared))
    slope, virial = torch.autograd.grad(energy.sum(), [positions, strain], create_graph=second)
    return Figures(energy, -slope, virial / batch.volumes[:, None, None])
