"""The one autograd rule: backward applies the adjoint, forward mode applies the op, vmap moves a dimension.

Since an adjoint is an op itself and is applied by the same rule, every order of derivative comes by itself.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from gradmesh._torch import functorch_active, is_legacy_batched, on_legacy_batch, transforms_active
from gradmesh.ops.base import LinearOp, Op

__all__ = ["apply"]


def apply(op: Op, x: Tensor) -> Tensor:
    """Run an op on this rank's tensor, differentiably.

    Where no derivative can be asked for, the op is run bare: building a graph node costs more than a small
    collective on fast backends.
    """
    if is_legacy_batched(x):
        return on_legacy_batch(x, lambda whole: apply(op.batched(), whole))
    recording = torch.is_grad_enabled()
    if recording and op.rooted and not x.requires_grad:
        x = _take_part(x)
    if (recording and x.requires_grad) or transforms_active():
        result: Tensor = _Rule.apply(op, x)  # type: ignore[no-untyped-call]
        return result
    return op.apply(x)


def _take_part(x: Tensor) -> Tensor:
    """`x` as a leaf that requires grad, so that this rank joins the backward collective of a rooted op.

    Only the root's operand counts, and a rank whose own does not require grad would stay away while the root
    waits. Inside a torch.func transform this is for the caller to see to: no new leaf can be made there.
    """
    if functorch_active() or not (x.is_floating_point() or x.is_complex()):
        return x
    if not transforms_active():
        return x.detach().requires_grad_()
    primal, tangent = forward_ad.unpack_dual(x)
    leaf: Tensor = primal.detach().requires_grad_()
    if tangent is None:
        return leaf
    dual: Tensor = forward_ad.make_dual(leaf, tangent)
    return dual


class _Rule(torch.autograd.Function):
    """The law of `gradmesh.ops.base`, told to autograd."""

    @staticmethod
    def forward(op: Op, x: Tensor) -> Tensor:
        return op.apply(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Op, Tensor], output: Tensor) -> None:  # noqa: ARG004 - torch's names
        ctx.op = inputs[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        op: LinearOp = ctx.op
        return None, apply(op.adjoint, grad)

    @staticmethod
    def jvp(ctx: Any, _: None, tangent: Tensor) -> Tensor:
        return apply(ctx.op, tangent)

    @staticmethod
    def vmap(_: Any, in_dims: tuple[None, int], op: Op, x: Tensor) -> tuple[Tensor, int]:
        return apply(op.batched(), x.movedim(in_dims[1], 0)), 0


# Function.apply asks for the signature at every call; computing it anew takes longer than the rest of the rule.
_Rule.forward.__signature__ = inspect.signature(_Rule.forward)  # type: ignore[attr-defined]
