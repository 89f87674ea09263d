"""Megatron's autograd Functions, under their original names; `group` as in the mappings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from gradmesh.compat import _ops
from gradmesh.compat._function import OpFunction, adjoint, again, run
from gradmesh.compat.megatron.arguments import Group, Sizes, axis_of, ints
from gradmesh.ops.base import LinearOp
from gradmesh.runtime.mesh import Axis, balanced
from gradmesh.types import I, R

__all__: list[str] = []
"""Empty: the names are private in the original too."""


def _forward(make: Callable[[Tensor, Axis], LinearOp]) -> Any:
    """`forward(ctx, input_, group)` that applies an op and saves it on `ctx`."""

    def forward(ctx: Any, input_: Tensor, group: Group = None) -> Tensor:
        return run(ctx, make(input_, axis_of(group)), input_, others=1)

    return staticmethod(forward)


class _CopyToModelParallelRegion(OpFunction):
    """I -> R: the identity; backward sums. See `copy_to_tensor_model_parallel_region`."""

    forward = _forward(lambda x, axis: _ops.replicate(x, axis))


class _ReduceFromModelParallelRegion(OpFunction):
    """P -> I: the sum; backward passes the gradient on. See `reduce_from_tensor_model_parallel_region`."""

    forward = _forward(lambda x, axis: _ops.all_reduce(x, axis, dst=I))


class _ScatterToModelParallelRegion(OpFunction):
    """I -> V: this rank's slice of the last dimension; backward concatenates."""

    forward = _forward(lambda x, axis: _ops.shard(x, axis, -1, balanced))


class _GatherFromModelParallelRegion(OpFunction):
    """V -> I: concatenate along the last dimension; backward keeps this rank's slice."""

    forward = _forward(lambda x, axis: _ops.all_gather(x, axis, -1, dst=I))


class _ScatterToSequenceParallelRegion(OpFunction):
    """I -> V: this rank's slice of the first dimension; backward concatenates."""

    forward = _forward(lambda x, axis: _ops.shard(x, axis, 0, balanced))


class _GatherFromSequenceParallelRegion(OpFunction):
    """V -> R, or V -> I: concatenate along the first dimension. See `gather_from_sequence_parallel_region`."""

    @staticmethod
    def forward(
        ctx: Any,
        input_: Tensor,
        group: Group = None,
        tensor_parallel_output_grad: bool = True,
        output_split_sizes: Sizes = None,
        use_global_buffer: bool = False,  # noqa: ARG004 - results are always freshly allocated
    ) -> Tensor:
        """Gather, and save the op on `ctx`."""
        dst, sizes = R if tensor_parallel_output_grad else I, ints(output_split_sizes)
        op = _ops.all_gather(input_, axis_of(group), 0, dst=dst, sizes=sizes)
        return run(ctx, op, input_, others=4)


class _ReduceScatterToSequenceParallelRegion(OpFunction):
    """P -> V: the sum, and this rank's slice of the first dimension; backward concatenates."""

    @staticmethod
    def forward(
        ctx: Any,
        input_: Tensor,
        group: Group = None,
        input_split_sizes: Sizes = None,
        use_global_buffer: bool = False,  # noqa: ARG004
    ) -> Tensor:
        """Sum, keep this rank's slice, and on `ctx` what backward needs."""
        op = _ops.reduce_scatter(input_, axis_of(group), 0, ints(input_split_sizes))
        return run(ctx, op, input_, others=3)


class _AllGatherFromTensorParallelRegion(OpFunction):
    """V -> R: concatenate along the last dimension; backward sums and keeps this rank's slice."""

    forward = _forward(lambda x, axis: _ops.all_gather(x, axis, -1, dst=R))


class _ReduceScatterToTensorParallelRegion(OpFunction):
    """P -> V: the sum, and this rank's slice of the last dimension; backward concatenates."""

    forward = _forward(lambda x, axis: _ops.reduce_scatter(x, axis, -1))


class _AllToAll(OpFunction):
    """V -> V: exchange parts of the first dimension; backward is the inverse exchange. The group comes first."""

    @staticmethod
    def forward(
        ctx: Any,
        group: Group,
        input: Tensor,  # noqa: A002 - its name in the original
        output_split_sizes: Sizes = None,
        input_split_sizes: Sizes = None,
    ) -> Tensor:
        """Exchange, and save the op on `ctx`."""
        send, receive = ints(input_split_sizes), ints(output_split_sizes)
        return run(ctx, _ops.all_to_all(input, axis_of(group), send, receive), input, others=3)

    @staticmethod
    def backward(ctx: Any, *grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """The inverse exchange; None for the group and the sizes."""
        return None, adjoint(ctx, grad_output[0]), None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        """Exchange the tangent."""
        return again(ctx, tangents[1])
