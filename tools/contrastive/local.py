"""The common recipe, to compare with: gathered embeddings, this rank's rows of logits in memory, cross entropy."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import gradmesh as gm


def local_loss(left: Tensor, right: Tensor, scale: Tensor, *, gathered: bool = True) -> Tensor:
    """The mean over this rank's pairs, of equally many on every rank; the gradient goes through the gather."""
    n, rank = len(left), gm.rank() if gathered else 0
    places = torch.arange(n) + n * rank
    all_left, all_right = (gm.all_gather(left), gm.all_gather(right)) if gathered else (left, right)
    to_right = scale * left @ all_right.T
    to_left = scale * right @ all_left.T
    return (cross_entropy(to_right, places) + cross_entropy(to_left, places)) / 2
