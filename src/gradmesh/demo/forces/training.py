"""Training on energies, forces and stresses: the same steps on one process and on ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from ase import Atoms
from torch import Tensor
from torch.optim.lr_scheduler import CosineAnnealingLR

import gradmesh as gm
from gradmesh.demo.forces import parallel, single
from gradmesh.demo.forces.batches import Batch, Figures, batch_of
from gradmesh.demo.forces.layers import CUTOFF, Parts, copied
from gradmesh.demo.forces.once import OncePlan
from gradmesh.nn.graph import GraphPlan, by_graph, by_space

__all__ = [
    "Learner",
    "Sample",
    "Trace",
    "fitted",
    "loss_of",
    "owner_of",
    "samples_of",
    "train",
    "train_on_rank",
]

Model = TypeVar("Model", bound=Parts)

Sample = tuple[Batch, Figures]
"""Structures, and what is right of them."""

RATE = 0.05
DECAY = 0.9, 0.99
WEIGHTS = 1.0, 1.0, 0.3
"""Of the energy, the forces and the stress in the loss."""


def samples_of(made: Sequence[Atoms], batch: int, steps: int, seed: int) -> list[Sample]:
    """A batch for each step, of structures in an order that is drawn anew when all have been seen.

    Args:
        made: the structures.
        batch: how many a step is of.
        steps: how many steps.
        seed: decides the order.
    """
    order, drawn = torch.Generator().manual_seed(seed), list[Tensor]()
    while len(drawn) < steps:
        drawn += torch.randperm(len(made), generator=order).split(batch)
    return [batch_of([made[each] for each in numbers.tolist()], CUTOFF) for numbers in drawn[:steps]]


def fitted(model: Model, made: Sequence[Atoms]) -> Model:
    """The model, whose elements get the energies that, without any neighbours, are nearest to the structures'."""
    batch, right = batch_of(made, CUTOFF)
    counts = torch.zeros(batch.structures, len(model.alone), dtype=torch.float64)
    counts.index_put_((batch.structure, batch.kinds), torch.ones((), dtype=torch.float64), accumulate=True)
    each = (counts / batch.sizes[:, None], (right.energy / batch.sizes)[:, None])
    model.alone.copy_(torch.linalg.lstsq(*each, driver="gelsd").solution[:, 0])
    return model


def loss_of(found: Figures, right: Figures, batch: Batch) -> Tensor:
    """The mean square error: of energies by atom, of forces, and of stresses as energies by atom.

    Args:
        found: the figures of a model.
        right: what they are to be.
        batch: the structures.
    """
    sizes, whole = batch.sizes, batch.volumes.isfinite()
    energy = ((found.energy - right.energy) / sizes).square().mean()
    forces = (found.forces - right.forces).square().mean()
    volumes = (batch.volumes / sizes)[whole, None, None]
    stress = ((found.stress - right.stress)[whole] * volumes).square().sum() / (9 * batch.structures)
    return WEIGHTS[0] * energy + WEIGHTS[1] * forces + WEIGHTS[2] * stress


class Learner(Generic[Model]):
    """A model, and Adam, whose rate falls to zero like a cosine.

    Args:
        model: the potential.
        steps: how many there will be.

    Attributes:
        model: the potential.
        steps: how many there will be.
    """

    def __init__(self, model: Model, steps: int) -> None:
        self.model, self.steps = model, steps
        # The small number keeps rounding from deciding the direction where the gradient is zero.
        self._adam = torch.optim.Adam(model.parameters(), lr=RATE, betas=DECAY, eps=1e-6)
        self._rate = CosineAnnealingLR(self._adam, steps)

    def learn(self, gradient: Sequence[Tensor]) -> None:
        """Take a step."""
        for parameter, slope in zip(self.model.parameters(), gradient, strict=True):
            parameter.grad = slope
        self._adam.step()
        self._adam.zero_grad()
        self._rate.step()

    def copied(self) -> Learner[Model]:
        """One that has learned the same, and shares nothing with it."""
        return self._of(copied(self.model), self.steps, copy.deepcopy(self._learned()))

    def __reduce__(self) -> tuple[Any, ...]:
        # The schedule wraps a method of the optimizer, which does not survive pickling.
        return self._of, (self.model, self.steps, self._learned())

    def _learned(self) -> tuple[Any, Any]:
        return self._adam.state_dict(), self._rate.state_dict()

    @classmethod
    def _of(cls, model: Model, steps: int, learned: tuple[Any, Any]) -> Learner[Model]:
        made = cls(model, steps)
        made._adam.load_state_dict(learned[0])
        made._rate.load_state_dict(learned[1])
        return made

    @property
    def parameters(self) -> Tensor:
        """All of the model's, one after another."""
        return torch.cat([each.detach().reshape(-1) for each in self.model.parameters()])


@dataclass(frozen=True, eq=False)
class Trace:
    """What is compared of a run.

    Attributes:
        losses: of each step.
        parameters: after each step, shape (steps, parameters).
        gradient: of the first step.
    """

    losses: list[float]
    parameters: Tensor
    gradient: Tensor


def _trained(learner: Learner[Model], samples: Sequence[Sample], figures: Callable[..., Figures]) -> Trace:
    losses, parameters, first = list[float](), list[Tensor](), torch.empty(0)
    for number, (batch, right) in enumerate(samples):
        loss = loss_of(figures(number, batch), right, batch)
        gradient = torch.autograd.grad(loss, list(learner.model.parameters()))
        first = first if losses else torch.cat([each.reshape(-1) for each in gradient])
        learner.learn(gradient)
        losses.append(loss.item())
        parameters.append(learner.parameters)
    return Trace(losses, torch.stack(parameters), first)


def train(learner: Learner[single.Potential], samples: Sequence[Sample]) -> Trace:
    """Take a step for each sample, on this process.

    Args:
        learner: changed by it.
        samples: one for each step.
    """
    return _trained(learner, samples, lambda _, batch: single.figures(learner.model, batch, second=True))


def owner_of(batch: Batch, ranks: int, partition: str) -> Tensor:
    """The rank of each atom: by where it is, or by its structure."""
    if partition == "graphs":
        return by_graph(batch.structure, ranks)
    return by_space(batch.positions, ranks)


def train_on_rank(
    learner: Learner[parallel.Potential], samples: Sequence[Sample], partition: str, once: bool = False
) -> tuple[Learner[parallel.Potential], Trace]:
    """The same on ranks; every rank calls it.

    Args:
        learner: has a `parallel.Potential`; it is not changed.
        samples: one for each step, whole on every rank.
        partition: as in the settings.
        once: by exchanges whose gradient has no second derivative.
    """
    own = learner.copied()
    kind: Any = OncePlan if once else GraphPlan
    plans: dict[int, GraphPlan] = {}

    def figures(_: int, batch: Batch) -> Figures:
        plan = plans.get(id(batch))
        if plan is None:
            plan = plans[id(batch)] = kind(batch.edges, owner_of(batch, gm.world_size(), partition))
        return parallel.figures(own.model, plan, batch, second=True)

    trace = _trained(own, samples, figures)
    return own, trace
