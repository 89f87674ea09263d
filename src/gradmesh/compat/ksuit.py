"""Drop-in for `AllGatherGradAutograd` of `ksuit.distributed.functional`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from gradmesh.compat._shared import TupleFunction, gathered
from gradmesh.runtime.mesh import AxisLike, resolve
from gradmesh.types import R

__all__ = ["AllGatherGradAutograd"]


class AllGatherGradAutograd(TupleFunction):
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
        found = resolve(axis, "compat.ksuit.AllGatherGradAutograd")
        return gathered(ctx, x, found, dst=R, others=0 if axis is None else 1)
