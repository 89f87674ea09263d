"""The ranks beside one process: step by step in training, and in every figure and gradient of the trained potential."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from ase import Atoms
from torch import Tensor

import gradmesh as gm
from gradmesh.demo.forces import parallel, single
from gradmesh.demo.forces.batches import Figures
from gradmesh.demo.forces.layers import Parts, copied
from gradmesh.demo.forces.once import OncePlan
from gradmesh.demo.forces.settings import Settings, Watcher
from gradmesh.demo.forces.training import (
    Learner,
    Sample,
    fitted,
    loss_of,
    owner_of,
    samples_of,
    train,
    train_on_rank,
)
from gradmesh.nn.graph import GraphPlan

__all__ = ["Training", "deviations", "in_parts", "trained"]

PARTS = 10
"""In how many parts work is handed to the ranks; in between it is shown how far they are."""


@dataclass(frozen=True, eq=False)
class Training:
    """Training on ranks beside that on one process.

    Attributes:
        dense: the potential as one process trained it.
        model: the ranks' own.
        losses: of each step.
        loss_error: the largest difference between a loss and that of one process, relative to this.
        param_error: the largest difference of a parameter, after any step.
        rank_error: the largest difference of a parameter between two ranks.
    """

    dense: single.Potential
    model: parallel.Potential
    losses: list[float]
    loss_error: float
    param_error: float
    rank_error: float


def trained(ranks: gm.Ranks, made: Sequence[Atoms], settings: Settings, watcher: Watcher) -> Training:
    """Train on the ranks and on one process, with the same weights to begin with and the same batches."""
    samples = samples_of(made, settings.batch, settings.steps, settings.seed)
    dense = fitted(single.Potential(settings.channels, settings.seed), made)
    model = fitted(parallel.Potential(settings.channels, settings.seed), made)
    alone, learner = Learner(dense, settings.steps), Learner(model, settings.steps)
    losses: list[float] = []
    loss_error = param_error = rank_error = 0.0
    watcher.begin("training", settings.steps)
    for part in in_parts(samples):
        right = train(alone, part)
        found = ranks.run(train_on_rank, learner, part, settings.partition)
        learner = found[0][0]
        for own, theirs in found:
            rank_error = max(rank_error, _far(own.parameters, learner.parameters))
            param_error = max(param_error, _far(theirs.parameters, right.parameters))
            pairs = zip(theirs.losses, right.losses, strict=True)
            loss_error = max(loss_error, *(abs(one / other - 1) for one, other in pairs))
        losses += found[0][1].losses
        watcher.advance(len(part), f"loss {losses[-1]:.4f}")
    return Training(dense, learner.model, losses, loss_error, param_error, rank_error)


def in_parts(items: Sequence[Sample]) -> list[Sequence[Sample]]:
    """A list in some parts, one after another."""
    size = -(-len(items) // PARTS)
    return [items[begin : begin + size] for begin in range(0, len(items), size)]


def _far(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max())


def deviations(
    ranks: gm.Ranks, model: parallel.Potential, dense: single.Potential, sample: Sample, partition: str
) -> tuple[dict[str, float], float]:
    """How far the ranks are from one process that has the same weights.

    Returns:
        For the energy, the forces, the stress, and the gradient of the loss, the largest difference on any rank,
        relative to the largest value; and that of the gradient where exchanges have no second derivative.
    """
    dense.load_state_dict(model.state_dict())
    right = _of(single.figures(dense, sample[0], second=True), sample, dense)
    errors = [
        [
            max(_far(own[name], right[name]) for own in found) / float(right[name].abs().max())
            for name in right
        ]
        for found in (ranks.run(_on_rank, model, sample, partition, once) for once in (False, True))
    ]
    return dict(zip(right, errors[0], strict=True)), errors[1][-1]


def _on_rank(model: parallel.Potential, sample: Sample, partition: str, once: bool) -> dict[str, Tensor]:
    batch, own = sample[0], copied(model)
    kind = OncePlan if once else GraphPlan
    plan = kind(batch.edges, owner_of(batch, gm.world_size(), partition))
    return _of(parallel.figures(own, plan, batch, second=True), sample, own)


def _of(found: Figures, sample: Sample, model: Parts) -> dict[str, Tensor]:
    loss = loss_of(found, sample[1], sample[0])
    gradient = torch.autograd.grad(loss, list(model.parameters()))
    return {
        "energy": found.energy.detach(),
        "forces": found.forces.detach(),
        "stress": found.stress.detach(),
        "gradient of the loss": torch.cat([each.reshape(-1) for each in gradient]),
    }
