"""Megatron's autograd Functions, under the names that they have there; `group` as in the regions."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from gradmesh.axis import balanced
from gradmesh.compat import _ops
from gradmesh.compat._function import OpFunction, adjoint, again, run
from gradmesh.compat.megatron.arguments import Group, Sizes, axis_of, ints
from gradmesh.types import I, R

__all__: list[str] = []
"""Nothing: the names are private in the original too."""


class _CopyToModelParallelRegion(OpFunction):
    """I -> R: the identity; backward sums. See `copy_to_tensor_model_parallel_region`."""

    @staticmethod
    def forward(ctx: Any, input_: Tensor, group: Group = None) -> Tensor:
        """Copy, and keep on `ctx` what backward needs."""
        return run(ctx, _ops.replicate(input_, axis_of(group)), input_, others=1)


class _ReduceFromModelParallelRegion(OpFunction):
    """P -> I: the sum; backward passes the gradient on. See `reduce_from_tensor_model_parallel_region`."""

    @staticmethod
    def forward(ctx: Any, input_: Tensor, group: Group = None) -> Tensor:
        """Sum, and keep on `ctx` what backward needs."""
        return run(ctx, _ops.all_reduce(input_, axis_of(group), dst=I), input_, others=1)


class _ScatterToModelParallelRegion(OpFunction):
    """I -> V: this rank's part of the last dimension; backward concatenates."""

    @staticmethod
    def forward(ctx: Any, input_: Tensor, group: Group = None) -> Tensor:
        """Keep this rank's part, and on `ctx` what backward needs."""
        return run(ctx, _ops.shard(input_, axis_of(group), -1, balanced), input_, others=1)


class _GatherFromModelParallelRegion(OpFunction):
    """V -> I: concatenate along the last dimension; backward keeps this rank's part."""

    @staticmethod
    def forward(ctx: Any, input_: Tensor, group: Group = None) -> Tensor:
        """Gather, and keep on `ctx` what backward needs."""
        return run(ctx, _ops.all_gather(input_, axis_of(group), -1, dst=I), input_, others=1)


class _ScatterToSequenceParallelRegion(OpFunction):
    """I -> V: this rank's part of the first dimension; backward concatenates."""

    @staticmethod
    def forward(ctx: Any, input_: Tensor, group: Group = None) -> Tensor:
        """Keep this rank's part, and on `ctx` what backward needs."""
        return run(ctx, _ops.shard(input_, axis_of(group), 0, balanced), input_, others=1)


class _GatherFromSequenceParallelRegion(OpFunction):
    """V -> R, or V -> I: concatenate along the first dimension. See `gather_from_sequence_parallel_region`."""

    @staticmethod
    def forward(
        ctx: Any,
        input_: Tensor,
        group: Group = None,
        tensor_parallel_output_grad: bool = True,
        output_split_sizes: Sizes = None,
        use_global_buffer: bool = False,  # noqa: ARG004 - a choice of memory; results are always fresh here
    ) -> Tensor:
        """Gather, and keep on `ctx` what backward needs."""
        dst, sizes = R if tensor_parallel_output_grad else I, ints(output_split_sizes)
        op = _ops.all_gather(input_, axis_of(group), 0, dst=dst, sizes=sizes)
        return run(ctx, op, input_, others=4)


class _ReduceScatterToSequenceParallelRegion(OpFunction):
    """P -> V: the sum, and this rank's part of the first dimension; backward concatenates."""

    @staticmethod
    def forward(
        ctx: Any,
        input_: Tensor,
        group: Group = None,
        input_split_sizes: Sizes = None,
        use_global_buffer: bool = False,  # noqa: ARG004
    ) -> Tensor:
        """Sum, keep this rank's part, and on `ctx` what backward needs."""
        op = _ops.reduce_scatter(input_, axis_of(group), 0, ints(input_split_sizes))
        return run(ctx, op, input_, others=3)


class _AllGatherFromTensorParallelRegion(OpFunction):
    """V -> R: concatenate along the last dimension; backward sums and keeps this rank's part."""

    @staticmethod
    def forward(ctx: Any, input_: Tensor, group: Group = None) -> Tensor:
        """Gather, and keep on `ctx` what backward needs."""
        return run(ctx, _ops.all_gather(input_, axis_of(group), -1, dst=R), input_, others=1)


class _ReduceScatterToTensorParallelRegion(OpFunction):
    """P -> V: the sum, and this rank's part of the last dimension; backward concatenates."""

    @staticmethod
    def forward(ctx: Any, input_: Tensor, group: Group = None) -> Tensor:
        """Sum, keep this rank's part, and on `ctx` what backward needs."""
        return run(ctx, _ops.reduce_scatter(input_, axis_of(group), -1), input_, others=1)


class _AllToAll(OpFunction):
    """V -> V: exchange parts of the first dimension; backward is the way back. The group comes first."""

    @staticmethod
    def forward(
        ctx: Any,
        group: Group,
        input: Tensor,  # noqa: A002 - its name in the original
        output_split_sizes: Sizes = None,
        input_split_sizes: Sizes = None,
    ) -> Tensor:
        """Exchange, and keep on `ctx` what backward needs."""
        send, receive = ints(input_split_sizes), ints(output_split_sizes)
        return run(ctx, _ops.all_to_all(input, axis_of(group), send, receive), input, others=3)

    @staticmethod
    def backward(ctx: Any, *grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """The way back; None for the group and the sizes."""
        return None, adjoint(ctx, grad_output[0]), None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        """Exchange the tangent's parts."""
        return again(ctx, tangents[1])
