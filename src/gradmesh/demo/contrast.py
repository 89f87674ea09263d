"""Two views, an encoder for each, and their contrastive loss: over ranks, and densely in one process.

Each rank encodes its rows of the global batch and compares them with the gathered rows of all ranks, in both
directions (Radford et al., Learning Transferable Visual Models From Natural Language Supervision, 2021). Its
loss is its rows' share of the batch's mean, so the losses differ from rank to rank and add up to the objective.

What a rank function needs comes as an argument: ranks that are processes have nothing else.
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

__all__ = ["GATHERS", "Learner", "Towers", "Views", "dense_loss", "rank_epoch", "rank_gradient", "rank_loss", "train"]

PIXELS = 8 * 4
HIDDEN = 128
FEATURES = 32
LARGEST_SCALE = 100.0
"""Bound on the inverse temperature, CLIP's own."""

Views = tuple[Tensor, Tensor]


class Towers(nn.Module):
    """An encoder for each view, and the learnable temperature that their similarities are divided by."""

    def __init__(self) -> None:
        super().__init__()
        self.left = _encoder()
        self.right = _encoder()
        self.log_scale = nn.Parameter(torch.tensor(10.0, dtype=torch.float64).log())

    def forward(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The unit vectors of both views, and the inverse temperature."""
        return normalize(self.left(left), dim=1), normalize(self.right(right), dim=1), self.log_scale.exp()


def _encoder() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(PIXELS, HIDDEN, dtype=torch.float64),
        nn.GELU(),
        nn.Linear(HIDDEN, FEATURES, dtype=torch.float64),
    )


def _gather(x: Tensor, sizes: Sequence[int]) -> Tensor:
    return gm.all_gather(x, sizes=sizes)


# What torch.distributed.all_gather fills into its output list has these values and no graph behind it.
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
"""Three gathers of the same values. The second one's backward stops at the gather; the third one's hands each rank
the own slice of the own gradient, which is right only where every rank's loss is the same."""


def rank_loss(gather: str, model: Towers, views: Views, batch: Tensor) -> Tensor:
    """This rank's share of the loss of a global batch.

    Args:
        gather: which of `GATHERS`.
        model: the same on every rank.
        views: both views of all images.
        batch: the images of the global batch, by number, the same on every rank.
    """
    mine = gm.shard(torch.arange(len(batch)))
    sizes = gm.sizes(mine)
    # Every rank uses the parameters on other rows: their gradients are sums over the ranks, and replicate takes them.
    parameters = {name: gm.replicate(parameter) for name, parameter in model.named_parameters()}
    left, right = (view[batch[mine]] for view in views)
    left, right, scale = functional_call(model, parameters, (left, right))
    all_left, all_right = (GATHERS[gather](x, sizes) for x in (left, right))
    to_right = cross_entropy(scale * left @ all_right.T, mine, reduction="sum")
    to_left = cross_entropy(scale * right @ all_left.T, mine, reduction="sum")
    return (to_right + to_left) / (2 * len(batch))


def dense_loss(model: Towers, views: Views, batch: Tensor) -> Tensor:
    """The loss of a global batch in one process: nothing of gradmesh takes part."""
    left, right, scale = model(*(view[batch] for view in views))
    similarity = scale * left @ right.T
    matches = torch.arange(len(batch))
    return (cross_entropy(similarity, matches) + cross_entropy(similarity.T, matches)) / 2


@dataclass
class Learner:
    """A model with the optimizer that holds its momentum."""

    model: Towers
    optimizer: torch.optim.SGD

    @classmethod
    def new(cls, seed: int) -> Learner:
        """Draw the initial parameters."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = Towers()
        # Plain SGD and not Adam, which would hide a gradient that is wrong by a factor.
        return cls(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))


def train(learner: Learner, loss_of: Callable[[Towers, Tensor], Tensor], batches: Sequence[Tensor]) -> list[float]:
    """Train on the batches, in place, and return their losses."""
    losses = []
    for batch in batches:
        loss = loss_of(learner.model, batch)
        learner.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        learner.optimizer.step()
        with torch.no_grad():
            learner.model.log_scale.clamp_(max=math.log(LARGEST_SCALE))
        losses.append(loss.item())
    return losses


def rank_epoch(gather: str, learner: Learner, views: Views, batches: Sequence[Tensor]) -> tuple[Learner, list[float]]:
    """Train on the batches on one rank; returns the learner and this rank's shares of the losses."""
    learner = copy.deepcopy(learner)  # ranks that are threads are all handed the same one
    losses = train(learner, lambda model, batch: rank_loss(gather, model, views, batch), batches)
    return learner, losses


def rank_gradient(gather: str, model: Towers, views: Views, batch: Tensor) -> tuple[Tensor, ...]:
    """The gradient of every parameter, as this rank gets it."""
    return torch.autograd.grad(rank_loss(gather, model, views, batch), list(model.parameters()))
