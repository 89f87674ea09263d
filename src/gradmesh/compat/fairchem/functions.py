"""The autograd Functions of fairchem-core 2.11 and later, where these differ from those before."""

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
    """The balanced split: the first `size % parts` parts have one more.

    >>> size_list_fn(5, 3)
    [2, 2, 1]
    """
    share, more = divmod(size, parts)
    return [share + (part < more) for part in range(parts)]


class AllReduceSumWithGrad(OpFunction):
    """P -> R: the sum over the gp group; backward sums too. See `all_reduce_sum_with_grad`."""

    @staticmethod
    def forward(ctx: Any, input: Tensor) -> Tensor:
        """Sum, and keep on `ctx` what backward needs."""
        return run(ctx, _ops.all_reduce(input, gp_axis(), dst=R), input)


class ScatterToModelParallelRegion(OpFunction):
    """I -> V: the own balanced part of dim 0; backward concatenates. See `scatter_to_model_parallel_region`."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, dim: int = -1) -> Tensor:  # noqa: ARG004 - not read by the original either
        """Keep the own part of dim 0, and on `ctx` what backward needs; `dim` is not read."""
        return run(ctx, _ops.shard(input, gp_axis(), 0, size_list_fn), input, others=1)


class _Parts(OpFunction):
    """A gather along dim 0 whose result is the tuple of the ranks' tensors, of one shape."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """Apply the adjoint of the gather to the gradients of all parts.

        Raises:
            ArgumentError: `forward` did not run with this context.
        """
        return adjoint(ctx, torch.cat(grads))

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> tuple[Tensor, ...]:
        """Gather the tangents.

        Raises:
            ArgumentError: `forward` did not run with this context.
        """
        return _cut(again(ctx, tangent))


class GatherFromModelParallelRegionGradPadded(_Parts):
    """The ranks' tensors, of one shape, as a tuple; backward is the own one's gradient.

    ::

        V -> I    shape (n, ...) -> W of shape (n, ...)    x0 -> (x0, x1)      g[0] <- (g[0], g[1])
                                                           x1 -> (x0, x1)      g[1] <- (g[0], g[1])
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor) -> tuple[Tensor, ...]:
        """Gather, and keep on `ctx` what backward needs."""
        return _cut(run(ctx, _ops.all_gather(input, gp_axis(), dst=I), input))


class GatherFromModelParallelRegionSumGradPadded(_Parts):
    """The ranks' tensors, of one shape, as a tuple; backward adds the ranks' gradients of the own one.

    ::

        V -> R    shape (n, ...) -> W of shape (n, ...)    x0 -> (x0, x1)      g0[0]+g1[0] <- (g0[0], g0[1])
                                                           x1 -> (x0, x1)      g0[1]+g1[1] <- (g1[0], g1[1])

    A rank may leave parts of the tuple unused, but every rank has to use one, as backward needs all ranks.
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor) -> tuple[Tensor, ...]:
        """Gather, and keep on `ctx` what backward needs."""
        return _cut(run(ctx, _ops.all_gather(input, gp_axis(), dst=R), input))


def _cut(whole: Tensor) -> tuple[Tensor, ...]:
    """The ranks' parts, as tensors that can be used and changed each on its own."""
    size = gp_axis().size
    return separate(whole.reshape(size, whole.size(0) // size, *whole.shape[1:]))
