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
from gradmesh.nn.graph import GraphPlan, by_graph, by_space
from gradmesh_demos.forces import Job, parallel, single
from gradmesh_demos.forces.layers import CUTOFF, OncePlan, Parts, copied
from gradmesh_demos.forces.structures import Batch, Figures, batch_of
from gradmesh_demos.runner import Watcher

Model = TypeVar("Model", bound=Parts)

Sample = tuple[Batch, Figures]
"""Structures, and what is right of them."""

RATE = 0.05
DECAY = 0.9, 0.99
WEIGHTS = 1.0, 1.0, 0.3
"""Of the energy, the forces and the stress in the loss."""


def samples_of(made: Sequence[Atoms], batch: int, steps: int, seed: int) -> list[Sample]:
    """A batch for each step, of structures in an order that is drawn anew when all have been seen."""
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
    """The mean square error: of energies by atom, of forces, and of stresses as energies by atom."""
    sizes, whole = batch.sizes, batch.volumes.isfinite()
    energy = ((found.energy - right.energy) / sizes).square().mean()
    forces = (found.forces - right.forces).square().mean()
    volumes = (batch.volumes / sizes)[whole, None, None]
    stress = ((found.stress - right.stress)[whole] * volumes).square().sum() / (9 * batch.structures)
    return WEIGHTS[0] * energy + WEIGHTS[1] * forces + WEIGHTS[2] * stress


class Learner(Generic[Model]):
    """A model, and Adam, whose rate falls to zero like a cosine."""

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
    """What is compared of a run."""

    losses: list[float]  # of each step
    parameters: Tensor  # after each step, shape (steps, parameters)
    gradient: Tensor  # of the first step


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
    """Take a step for each sample, on this process."""
    return _trained(learner, samples, lambda _, batch: single.figures(learner.model, batch, second=True))


def owner_of(batch: Batch, ranks: int, partition: str) -> Tensor:
    """The rank of each atom: by where it is, or by its structure."""
    if partition == "graphs":
        return by_graph(batch.structure, ranks)
    return by_space(batch.positions, ranks)


def train_on_rank(
    learner: Learner[parallel.Potential], samples: Sequence[Sample], partition: str, once: bool = False
) -> tuple[Learner[parallel.Potential], Trace]:
    """The same on ranks; every rank calls it."""
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


PARTS = 10
"""In how many parts work is handed to the ranks; in between it is shown how far they are."""


@dataclass(frozen=True, eq=False)
class Training:
    """Training on ranks beside that on one process."""

    dense: single.Potential  # the potential as one process trained it
    model: parallel.Potential  # the ranks' own
    losses: list[float]  # of each step
    loss_error: float  # the largest difference between a loss and that of one process, relative to this
    param_error: float  # the largest difference of a parameter, after any step
    rank_error: float  # the largest difference of a parameter between two ranks


def trained(ranks: gm.Ranks, made: Sequence[Atoms], job: Job, watcher: Watcher) -> Training:
    """Train on the ranks and on one process, with the same weights to begin with and the same batches."""
    samples = samples_of(made, job.batch, job.steps, job.seed)
    dense = fitted(single.Potential(job.channels, job.seed), made)
    model = fitted(parallel.Potential(job.channels, job.seed), made)
    alone, learner = Learner(dense, job.steps), Learner(model, job.steps)
    losses: list[float] = []
    loss_error = param_error = rank_error = 0.0
    watcher.begin("training", job.steps, only=True)
    for part in in_parts(samples):
        right = train(alone, part)
        found = ranks.run(train_on_rank, learner, part, job.partition)
        learner = found[0][0]
        for own, theirs in found:
            rank_error = max(rank_error, _far(own.parameters, learner.parameters))
            param_error = max(param_error, _far(theirs.parameters, right.parameters))
            pairs = zip(theirs.losses, right.losses, strict=True)
            loss_error = max(loss_error, *(abs(one / other - 1) for one, other in pairs))
        losses += found[0][1].losses
        watcher.advance("training", len(part), f"loss {losses[-1]:.4f}")
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
    """How far the ranks are from one process that has the same weights."""
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
