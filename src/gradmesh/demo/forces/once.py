"""A plan whose exchange is differentiable once: what an all-to-all with a backward written by hand mostly is."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gradmesh.nn.graph import GraphPlan

__all__ = ["OncePlan"]


class OncePlan(GraphPlan):
    """Its energies and forces are right. A loss on forces has a wrong gradient, and nothing says so.

    Its backward sends rows back as it should, by calls of which autograd does not know.
    """

    def exchange(self, x: Tensor, **options: Any) -> Any:
        """As `GraphPlan.exchange`; the gradient of its gradient is taken for zero."""
        del options
        return _Once.apply(x, super().exchange)  # type: ignore[no-untyped-call]


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Any) -> Tensor:
        ctx.exchange, ctx.like = exchange, x.detach()
        sent: Tensor = exchange(x)
        return sent

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        with torch.enable_grad():
            x = ctx.like.clone().requires_grad_()
            (back,) = torch.autograd.grad(ctx.exchange(x), x, gradient.detach())
        return back, None
