"""Drop-in for `AllGatherGradAutograd` of `ksuit.distributed.functional`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gradmesh.compat import _shared
from gradmesh.compat._shared import OpFunction, adjoint, again, run, with_nones
from gradmesh.runtime.mesh import AxisLike, resolve
from gradmesh.types import R

__all__ = ["AllGatherGradAutograd"]


class AllGatherGradAutograd(OpFunction):
    """All ranks' tensors as a tuple; backward sums each tensor's gradient over the ranks, on the rank that holds it.

    ::

        V -> R    shape (...) -> W of shape (...)    x0 -> (x0, x1)      g0[0]+g1[0] <- (g0[0], g0[1])
                                                     x1 -> (x0, x1)      g0[1]+g1[1] <- (g1[0], g1[1])

    Unused elements of the tuple get zero gradients. Every rank must use at least one element, because backward is a
    collective.

    Call `AllGatherGradAutograd.apply(x)` or `.apply(x, axis)`; arguments and errors are those of `forward`.

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
        """Gather, and save the op on `ctx`.

        Args:
            ctx: any object, or None if `backward` is not called directly.
            x: this rank's tensor, of the same shape on all ranks. For shapes that differ along a dimension, use
                `gradmesh.all_gather(x, dim=dim, sizes="auto")`.
            axis: the ranks to gather from; defaults to the current mesh's only axis, else the world.

        Raises:
            MismatchError: the shapes differ (detected on some backends).
        """
        stack = x.unsqueeze(0)
        found = resolve(axis, "compat.ksuit.AllGatherGradAutograd")
        op = _shared.all_gather(stack, found, dst=R)
        return separate(run(ctx, op, stack, others=0 if axis is None else 1))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Sum all ranks' gradients of this rank's tensor.

        Returns:
            The gradient of `x`; in a tuple with None if an axis was passed to `forward`.

        Raises:
            ArgumentError: `forward` was not called with this context.
        """
        return with_nones(ctx, adjoint(ctx, torch.stack(grads)).squeeze(0))

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> tuple[Tensor, ...]:
        """Gather the tangents."""
        return separate(again(ctx, tangent.unsqueeze(0)))


def separate(stacked: Tensor) -> tuple[Tensor, ...]:
    """The entries along dim 0; `stacked` must not be used afterwards.

    Unlike the results of `unbind`, they are not views in autograd, so they can be modified in place.
    """
    return tuple(part.squeeze(0) for part in stacked.unsafe_split(1))
