"""A custom operator that holds a verb, as a user writes it; in a module, since processes have to import it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import gradmesh as gm

__all__ = ["gathered_norms", "plain"]


# The schema is read from annotations, which here are text.
@torch.library.custom_op(
    "gradmesh_tests::gathered_norms", mutates_args=(), schema="(Tensor x, str axis) -> Tensor"
)
def gathered_norms(x: Tensor, axis: str) -> Tensor:
    """The length of every rank's rows, on every rank."""
    return gm.all_gather(x.norm(dim=1), axis)


@gathered_norms.register_fake
def _(x: Tensor, axis: str) -> Tensor:
    return x.new_empty(gm.axis(axis).size * x.shape[0])


def _remember(ctx: Any, inputs: tuple[Tensor, str], output: Tensor) -> None:
    x, ctx.axis = inputs
    ctx.save_for_backward(x)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    (x,) = ctx.saved_tensors
    mine = gm.reduce_scatter(grad, ctx.axis)
    return mine[:, None] * x / x.norm(dim=1, keepdim=True), None


gathered_norms.register_autograd(_backward, setup_context=_remember)


def plain(x: Tensor, axis: str) -> Tensor:
    """The same, of verbs and torch's operators."""
    return gm.all_gather(x.norm(dim=1), axis)
