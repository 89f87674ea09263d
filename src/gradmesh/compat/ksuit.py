"""Drop-in for `AllGatherGradAutograd` of `ksuit.distributed.functional`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gradmesh.axis import AxisLike, resolve
from gradmesh.compat import _ops
from gradmesh.compat._function import OpFunction, adjoint, again, run, with_nones
from gradmesh.types import R

__all__ = ["AllGatherGradAutograd"]


class AllGatherGradAutograd(OpFunction):
    """Every rank's tensor, as a tuple; backward sums each one's gradient over the ranks, on the rank it came from.

    ::

        V -> R    shape (...) -> W of shape (...)    x0 -> (x0, x1)      g0[0]+g1[0] <- (g0[0], g0[1])
                                                     x1 -> (x0, x1)      g0[1]+g1[1] <- (g1[0], g1[1])

    A rank may leave parts of the tuple unused: they get zero gradients. It has to use at least one, as the backward
    collective needs every rank.

    It is called as `AllGatherGradAutograd.apply(x)` or `.apply(x, axis)`; the arguments and errors are those of
    `forward`.

    Example:
        >>> def on_each_rank():
        ...     x = torch.tensor(1.0 + gm.axis().rank, requires_grad=True)
        ...     first, second = AllGatherGradAutograd.apply(x)
        ...     (first * 10 if gm.axis().rank == 0 else first + second).backward()
        ...     return x.grad.item()
        >>> import torch, gradmesh as gm
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [11.0, 1.0]
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: AxisLike = None) -> tuple[Tensor, ...]:
        """Gather, and keep on `ctx` what backward needs.

        Args:
            ctx: any object, or None for a call without a backward by hand.
            x: this rank's tensor, of one shape on all ranks, as in the original, so that one collective does it. For
                shapes that differ along a dimension use `gradmesh.all_gather(x, dim=dim, sizes="auto")`.
            axis: the ranks to gather from; by default the current mesh's only axis, else the world.

        Raises:
            MismatchError: the shapes differ (on backends that can tell).
        """
        stack = x.unsqueeze(0)
        found = resolve(axis, "compat.ksuit.AllGatherGradAutograd")
        op = _ops.all_gather(stack, found, dst=R)
        return separate(run(ctx, op, stack, others=0 if axis is None else 1))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Add the gradients of the own tensor, of which every rank has one.

        Returns:
            The gradient of `x`; in a tuple with None if `forward` was given an axis.

        Raises:
            ArgumentError: `forward` did not run with this context.
        """
        return with_nones(ctx, adjoint(ctx, torch.stack(grads)).squeeze(0))

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> tuple[Tensor, ...]:
        """Every rank's tangent."""
        return separate(again(ctx, tangent.unsqueeze(0)))


def separate(stacked: Tensor) -> tuple[Tensor, ...]:
    """The entries along dim 0, as tensors that can be used and changed each on its own.

    Unlike those of `unbind`, they are no views to autograd, which would refuse to change one of several in place.
    The stack itself must not be used any more.
    """
    return tuple(part.squeeze(0) for part in stacked.unsafe_split(1))
