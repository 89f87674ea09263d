"""The autograd Functions of graph parallelism, and private helpers of the original."""

# The signatures are those of the original, where a tensor is called `input`.
# ruff: noqa: A002

from __future__ import annotations

from typing import Any

from torch import Tensor

from gradmesh.autograd.rule import apply
from gradmesh.compat import _ops
from gradmesh.compat._function import OpFunction, run
from gradmesh.compat.gp_utils.cutting import part_sizes
from gradmesh.compat.gp_utils.groups import gp_axis
from gradmesh.types import I, R

__all__ = [
    "CopyToModelParallelRegion",
    "GatherFromModelParallelRegion",
    "GatherFromModelParallelRegionSumGrad",
    "ReduceFromModelParallelRegion",
    "ScaleBackwardGrad",
    "ScatterToModelParallelRegion",
]


class CopyToModelParallelRegion(OpFunction):
    """I -> R: the identity; backward sums over the gp group. See `copy_to_model_parallel_region`."""

    @staticmethod
    def forward(ctx: Any, input: Tensor) -> Tensor:
        """Copy, and save the op on `ctx`."""
        return run(ctx, _ops.replicate(input, gp_axis()), input)


class ReduceFromModelParallelRegion(OpFunction):
    """P -> I: the sum over the gp group; backward is the identity. See `reduce_from_model_parallel_region`."""

    @staticmethod
    def forward(ctx: Any, input: Tensor) -> Tensor:
        """Sum, and save the op on `ctx`."""
        return run(ctx, _ops.all_reduce(input, gp_axis(), dst=I), input)


class ScatterToModelParallelRegion(OpFunction):
    """I -> V: the local shard; backward concatenates the shards. See `scatter_to_model_parallel_region`."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, dim: int = -1) -> Tensor:
        """Take the local shard along `dim`, and save the op on `ctx`."""
        return run(ctx, _ops.shard(input, gp_axis(), dim, part_sizes), input, others=1)


class GatherFromModelParallelRegion(OpFunction):
    """V -> I: the shards concatenated; backward is the local shard. See `gather_from_model_parallel_region`."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, dim: int = -1) -> Tensor:
        """Concatenate along `dim`, and save the op on `ctx`."""
        op = _ops.all_gather(input, gp_axis(), dim, dst=I, sizes="auto")
        return run(ctx, op, input, others=1)


class GatherFromModelParallelRegionSumGrad(OpFunction):
    """V -> R: the shards concatenated; backward sums. See `gather_from_model_parallel_region_sum_grad`."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, dim: int = -1) -> Tensor:
        """Concatenate along `dim`, and save the op on `ctx`."""
        op = _ops.all_gather(input, gp_axis(), dim, dst=R, sizes="auto")
        return run(ctx, op, input, others=1)


class ScaleBackwardGrad(OpFunction):
    """I -> R: the identity; backward is W times the gradient. See `scale_backward_grad`."""

    @staticmethod
    def forward(ctx: Any, input: Tensor) -> Tensor:
        """Copy, and save the op on `ctx`."""
        return run(ctx, _ops.CountedByAll(gp_axis()), input)


def _reduce(ctx: Any, input: Tensor) -> Tensor:  # noqa: ARG001 - the original's signature
    """P -> I: the sum over the gp group, as a new tensor; backward is the identity."""
    return apply(_ops.all_reduce(input, gp_axis(), dst=I), input)


def _split(input: Tensor, dim: int = -1) -> Tensor:
    """I -> V: a copy of the local shard; backward concatenates."""
    return apply(_ops.shard(input, gp_axis(), dim, part_sizes), input)


def _gather(input: Tensor, dim: int = -1) -> Tensor:
    """V -> I: the shards of the gp group, of equal sizes, concatenated; backward is the local shard."""
    return apply(_ops.all_gather(input, gp_axis(), dim, dst=I), input)


def _gather_with_padding(input: Tensor, dim: int = -1) -> Tensor:
    """V -> I: the shards of the gp group, of any sizes, concatenated without padding; backward is the local shard."""
    return apply(_ops.all_gather(input, gp_axis(), dim, dst=I, sizes="auto"), input)
