"""Constructors of the ops that the drop-ins use directly, with the same argument checks as the verbs.

A Function's `forward` and `backward` are separate calls, so they need the op, not only the verb.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from gradmesh.ops.all_gather import AllGather, ReduceScatter
from gradmesh.ops.all_reduce import AllReduce, AllReduceInvariant, Replicate
from gradmesh.ops.all_to_all import AllToAll
from gradmesh.ops.base import LinearOp, SameShape
from gradmesh.ops.broadcast import Reduce
from gradmesh.ops.gather import Gather
from gradmesh.ops.neighbor import neighbors as neighbor_op
from gradmesh.ops.shard import AllGatherInvariant, Shard
from gradmesh.ops.sizes import Sizes
from gradmesh.runtime.mesh import Axis, AxisLike
from gradmesh.transport import Transport
from gradmesh.types import I, P, R, Type
from gradmesh.verbs.call import Call, SizesLike

__all__ = [
    "CountedByAll",
    "SumOfEqual",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "gather",
    "neighbors",
    "reduce",
    "reduce_scatter",
    "replicate",
    "shard",
    "single_rank_axis",
]


def single_rank_axis(name: str) -> Axis:
    """An axis with this rank only; needs no process group."""
    return Axis(name, 0, 1, dist.ProcessGroup(dist.HashStore(), 0, 1))  # type: ignore[attr-defined]


def all_gather(x: Tensor, axis: Axis, dim: int = 0, *, dst: Type, sizes: SizesLike = None) -> LinearOp:
    """The op of `gradmesh.all_gather`."""
    call = Call("all_gather", x, axis)
    dim = call.dim(dim)
    kind = AllGather if dst is R else AllGatherInvariant
    return kind(call.axis, dim, call.sizes(sizes, dim))


def all_reduce(x: Tensor, axis: Axis, *, dst: Type) -> LinearOp:
    """The op of `gradmesh.all_reduce`."""
    call = Call("all_reduce", x, axis)
    return (AllReduce if dst is R else AllReduceInvariant)(call.axis)


def replicate(x: Tensor, axis: Axis) -> LinearOp:
    """The op of `gradmesh.replicate`."""
    return Replicate(Call("replicate", x, axis).axis)


def shard(x: Tensor, axis: Axis, dim: int, split: Callable[[int, int], Sequence[int]]) -> LinearOp:
    """The op of `gradmesh.shard`; `split` maps the full size and the number of ranks to each rank's size."""
    call = Call("shard", x, axis)
    dim = call.dim(dim)
    return Shard(call.axis, dim, call.sizes(split(x.shape[dim], axis.size), dim))


def gather(x: Tensor, axis: Axis, root: int) -> LinearOp:
    """The op of `gradmesh.gather` along dim 0, one row from each rank; the verb would require `ordered()`."""
    call = Call("gather", x, axis)
    return Gather(call.axis, 0, root, Sizes((1,) * axis.size))


def reduce(x: Tensor, axis: Axis, root: int) -> LinearOp:
    """The op of `gradmesh.reduce`; the verb would require `ordered()`."""
    return Reduce(Call("reduce", x, axis).axis, root)


def reduce_scatter(x: Tensor, axis: Axis, dim: int, sizes: SizesLike = None) -> LinearOp:
    """The op of `gradmesh.reduce_scatter`."""
    call = Call("reduce_scatter", x, axis)
    dim = call.dim(dim)
    return ReduceScatter(call.axis, dim, call.sizes(sizes, dim))


def all_to_all(
    x: Tensor, axis: Axis, split_sizes: Sequence[int] | None, concat_sizes: Sequence[int] | None
) -> LinearOp:
    """The op of `gradmesh.all_to_all` along dim 0."""
    call = Call("all_to_all", x, axis)
    dim = call.dim(0)
    send = call.sizes(split_sizes, dim, "split_sizes")
    return AllToAll(call.axis, dim, dim, send, call.sizes(concat_sizes, dim, "concat_sizes"))


def neighbors(
    x: Tensor, axis: AxisLike, index: Tensor, sent: Sequence[int], received: Sequence[int]
) -> LinearOp:
    """The op of `gradmesh.neighbor_all_to_all`, with the rows for all ranks in one index."""
    call = Call("neighbor_all_to_all", x, axis)
    rows = dict(enumerate(index.split(list(sent))))
    return neighbor_op(x, call.axis, call.dim(0), rows, dict(enumerate(received)), call.fail)


@dataclass(frozen=True)
class CountedByAll(SameShape):
    """I -> R, the identity; like `replicate`, for a result whose gradient the caller guarantees to be equal everywhere.

    The sum of W equal gradients needs no communication. The adjoint is exact for such gradients only.
    """

    verb = "compat.gp_utils.scale_backward_grad"
    sends = False
    src, dst = I, R

    def transfer(self, x: Tensor, wire: Transport) -> Tensor:
        """Copy."""
        return wire.copy(x)

    @property
    def adjoint(self) -> LinearOp:
        """The sum of equal gradients."""
        return SumOfEqual(self.axis, **self.swapped)


@dataclass(frozen=True)
class SumOfEqual(SameShape):
    """P -> I, W times a term that is equal on all ranks. The adjoint of `CountedByAll`."""

    verb = "compat.gp_utils.scale_backward_grad"
    public = False
    sends = False
    src, dst = P, I

    def transfer(self, x: Tensor, wire: Transport) -> Tensor:
        """Scale."""
        return wire.copy(x).mul_(self.axis.size)

    @property
    def adjoint(self) -> LinearOp:
        """The identity."""
        return CountedByAll(self.axis, **self.swapped)
