"""The autograd Functions of fairchem-core 2.11 and later that differ from earlier versions."""

# The signatures are those of the original, where a tensor is called `input`.
# ruff: noqa: A002

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gradmesh.compat import _ops
from gradmesh.compat._function import OpFunction, adjoint, again, run
from gradmesh.compat.gp_utils.groups import gp_axis
from gradmesh.compat.ksuit import separate
from gradmesh.types import I, R

__all__ = [
    "AllReduceSumWithGrad",
    "GatherFromModelParallelRegionGradPadded",
    "GatherFromModelParallelRegionSumGradPadded",
    "ScatterToModelParallelRegion",
    "size_list_fn",
]


def size_list_fn(size: int, parts: int) -> list[int]:
    """An even split: the first `size % parts` parts have one more.

    >>> size_list_fn(5, 3)
    [2, 2, 1]
    """
    share, more = divmod(size, parts)
    return [share + (part < more) for part in range(parts)]


class AllReduceSumWithGrad(OpFunction):
    """P -> R: the sum over the gp group; backward sums too. See `all_reduce_sum_with_grad`."""

    @staticmethod
    def forward(ctx: Any, input: Tensor) -> Tensor:
        """Sum, and save the op on `ctx`."""
        return run(ctx, _ops.all_reduce(input, gp_axis(), dst=R), input)


class ScatterToModelParallelRegion(OpFunction):
    """I -> V: the local shard of dim 0; backward concatenates. See `scatter_to_model_parallel_region`."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, dim: int = -1) -> Tensor:  # noqa: ARG004 - ignored by the original too
        """Take the local shard of dim 0, and save the op on `ctx`; `dim` is ignored."""
        return run(ctx, _ops.shard(input, gp_axis(), 0, size_list_fn), input, others=1)


class _Parts(OpFunction):
    """A gather whose result is the tuple of the ranks' tensors, of the same shape."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """Apply the adjoint of the gather to the gradients of all parts.

        Raises:
            ArgumentError: `forward` was not called with this context.
        """
        return adjoint(ctx, torch.cat(grads))

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> tuple[Tensor, ...]:
        """Gather the tangents.

        Raises:
            ArgumentError: `forward` was not called with this context.
        """
        return _parts(again(ctx, tangent))


class GatherFromModelParallelRegionGradPadded(_Parts):
    """The ranks' tensors, of the same shape, as a tuple; backward is the gradient of this rank's tensor.

    ::

        V -> I    shape (n, ...) -> W of shape (n, ...)    x0 -> (x0, x1)      g[0] <- (g[0], g[1])
                                                           x1 -> (x0, x1)      g[1] <- (g[0], g[1])
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor) -> tuple[Tensor, ...]:
        """Gather, and save the op on `ctx`."""
        return _parts(run(ctx, _ops.all_gather(input, gp_axis(), dst=I), input))


class GatherFromModelParallelRegionSumGradPadded(_Parts):
    """The ranks' tensors, of the same shape, as a tuple; backward sums the ranks' gradients of this rank's tensor.

    ::

        V -> R    shape (n, ...) -> W of shape (n, ...)    x0 -> (x0, x1)      g0[0]+g1[0] <- (g0[0], g0[1])
                                                           x1 -> (x0, x1)      g0[1]+g1[1] <- (g1[0], g1[1])

    Every rank must use at least one element of the tuple, because backward is a collective.
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor) -> tuple[Tensor, ...]:
        """Gather, and save the op on `ctx`."""
        return _parts(run(ctx, _ops.all_gather(input, gp_axis(), dst=R), input))


def _parts(whole: Tensor) -> tuple[Tensor, ...]:
    """The ranks' tensors; see `separate`."""
    size = gp_axis().size
    return separate(whole.reshape(size, whole.size(0) // size, *whole.shape[1:]))
