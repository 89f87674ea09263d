"""Two encoders and their contrastive loss, on ranks and on one process.

Each rank encodes its rows of the global batch and compares them with the gathered rows of all ranks, in both
directions (Radford et al., Learning Transferable Visual Models From Natural Language Supervision, 2021). A rank's
loss is its rows' share of the batch's mean: losses differ between ranks and add up to the objective.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy, normalize

import gradmesh as gm
from gradmesh.demo.shared import seeded

__all__ = ["GATHERS", "Learner", "Towers", "Views", "dense_loss", "rank_epoch", "rank_gradient", "rank_loss"]

PIXELS = 8 * 4
HIDDEN = 128
FEATURES = 32
RATE = 0.05
MOMENTUM = 0.9
LARGEST_SCALE = 100.0
"""Bound on the inverse temperature, as in CLIP."""

Views = tuple[Tensor, Tensor]


class Towers(nn.Module):
    """An encoder for each view, and the learned temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.left = _encoder()
        self.right = _encoder()
        self.log_scale = nn.Parameter(torch.tensor(10.0, dtype=torch.float64).log())

    def forward(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The normalized embeddings of both views, and the inverse temperature."""
        return normalize(self.left(left), dim=1), normalize(self.right(right), dim=1), self.log_scale.exp()


def _encoder() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(PIXELS, HIDDEN, dtype=torch.float64),
        nn.GELU(),
        nn.Linear(HIDDEN, FEATURES, dtype=torch.float64),
    )


def _gather(x: Tensor, sizes: Sequence[int]) -> Tensor:
    return gm.all_gather(x, sizes=sizes)


# Like torch.distributed.all_gather: the same values, without a gradient.
@torch.no_grad()
def _gather_without_gradient(x: Tensor, sizes: Sequence[int]) -> Tensor:
    return gm.all_gather(x, sizes=sizes)


def _gather_slice_only(x: Tensor, sizes: Sequence[int]) -> Tensor:
    return gm.all_gather(x, dst=gm.I, sizes=sizes)


GATHERS: dict[str, Callable[[Tensor, Sequence[int]], Tensor]] = {
    "gradmesh": _gather,
    "no gradient": _gather_without_gradient,
    "slice only": _gather_slice_only,
}
"""Three all-gathers with the same values. The second has no backward; the backward of the third returns this rank's
slice of its gradient, which is correct only if every rank has the same loss."""


def rank_loss(gather: str, model: Towers, views: Views, batch: Tensor) -> Tensor:
    """This rank's share of the loss of a global batch.

    Args:
        gather: a key of `GATHERS`.
        model: the module, with the same parameters on every rank.
        views: both views of all images.
        batch: the indices of the global batch, the same on every rank.
    """
    indices = torch.arange(len(batch))
    sizes = [len(rows) for rows in indices.tensor_split(gm.axis().size)]
    local = gm.shard(indices, sizes=sizes)
    left, right, scale = functional_call(
        model, _replicated(model), tuple(view[batch[local]] for view in views)
    )
    # One message for both views.
    all_left, all_right = GATHERS[gather](torch.stack([left, right], dim=1), sizes).unbind(dim=1)
    to_right = cross_entropy(scale * left @ all_right.T, local, reduction="sum")
    to_left = cross_entropy(scale * right @ all_left.T, local, reduction="sum")
    return (to_right + to_left) / (2 * len(batch))


def _replicated(model: nn.Module) -> dict[str, Tensor]:
    """The parameters for use on local rows: backward sums their gradients over the ranks, in one message."""
    parameters = dict(model.named_parameters())
    joined = gm.replicate(torch.cat([parameter.flatten() for parameter in parameters.values()]))
    pieces = joined.split([parameter.numel() for parameter in parameters.values()])
    return {
        name: piece.view_as(parameter)
        for (name, parameter), piece in zip(parameters.items(), pieces, strict=True)
    }


def dense_loss(model: Towers, views: Views, batch: Tensor) -> Tensor:
    """The loss of a global batch on one process, without gradmesh."""
    left, right, scale = model(*(view[batch] for view in views))
    similarity = scale * left @ right.T
    matches = torch.arange(len(batch))
    return (cross_entropy(similarity, matches) + cross_entropy(similarity.T, matches)) / 2


@dataclass
class Learner:
    """A model, trained by SGD with momentum. Adam would hide a gradient that is wrong by a factor."""

    model: Towers
    velocity: list[Tensor]

    @classmethod
    def new(cls, seed: int) -> Learner:
        """Draw the initial parameters."""
        with seeded(seed):
            model = Towers()
        return cls(model, [torch.zeros_like(parameter) for parameter in model.parameters()])

    def train(self, loss_of: Callable[[Towers, Tensor], Tensor], batches: Sequence[Tensor]) -> list[float]:
        """Take a step for each batch, and return the losses."""
        losses = []
        for batch in batches:
            loss = loss_of(self.model, batch)
            self._step(torch.autograd.grad(loss, list(self.model.parameters())))
            losses.append(loss.item())
        return losses

    @torch.no_grad()
    def _step(self, gradient: Sequence[Tensor]) -> None:
        for parameter, velocity, grad in zip(self.model.parameters(), self.velocity, gradient, strict=True):
            velocity.mul_(MOMENTUM).add_(grad)
            parameter.sub_(RATE * velocity)
        self.model.log_scale.clamp_(max=math.log(LARGEST_SCALE))


# Thread ranks receive the same objects, so each works on a copy; functional_call also modifies the module temporarily.


def rank_epoch(
    gather: str, learner: Learner, views: Views, batches: Sequence[Tensor]
) -> tuple[Learner, list[float]]:
    """Train on one rank; returns the learner and this rank's losses."""
    learner = copy.deepcopy(learner)
    losses = learner.train(lambda model, batch: rank_loss(gather, model, views, batch), batches)
    return learner, losses


def rank_gradient(gather: str, model: Towers, views: Views, batch: Tensor) -> tuple[Tensor, ...]:
    """The gradient of every parameter on this rank."""
    model = copy.deepcopy(model)
    return torch.autograd.grad(rank_loss(gather, model, views, batch), list(model.parameters()))
