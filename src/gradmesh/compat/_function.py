"""What callers of a `torch.autograd.Function` use, for classes that are only a name for a verb."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

__all__ = ["FunctionLike"]


class FunctionLike(FunctionCtx):
    """A class that is called like an autograd Function; its derivative is that of the verb behind `apply`.

    A subclass defines `apply(x, *others)`, linear in `x`. `forward`, `backward` and `jvp` are for callers who drive
    them by hand, with any object as context (an instance of the class will do). They are read off the graph that
    `apply` records, so that no derivative is written here a second time.
    """

    apply: ClassVar[Any]

    @classmethod
    def forward(cls, ctx: Any, x: Tensor, *others: Any) -> Any:
        """Run `apply`, and keep on `ctx` what `backward` and `jvp` need."""
        if ctx is None:
            return cls.apply(x, *others)
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            result = cls.apply(leaf, *others)
        ctx.recorded = leaf, result, others
        if isinstance(result, tuple):
            return tuple(part.detach() for part in result)
        return result.detach()

    @classmethod
    def backward(cls, ctx: Any, *grads: Tensor) -> Any:
        """Apply the adjoint; a None for every further argument of `forward` follows the gradient."""
        leaf, result, others = ctx.recorded
        recording = torch.is_grad_enabled()
        (grad,) = torch.autograd.grad(result, leaf, grads, retain_graph=True, create_graph=recording)
        return (grad, *(None for _ in others)) if others else grad

    vjp = backward

    @classmethod
    def jvp(cls, ctx: Any, tangent: Tensor, *_: None) -> Any:
        """Apply the map itself: it is linear."""
        others = ctx.recorded[2]
        return cls.apply(tangent, *others)
