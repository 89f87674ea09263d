"""Rooted collectives: broadcast, gather, scatter, reduce."""

# The signatures are torch's own, where a tensor is called `input`.

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from gradmesh.autograd.rule import apply
from gradmesh.compat import _ops
from gradmesh.compat.ksuit import separate
from gradmesh.compat.torch_nn.arguments import Reduction, axis_of, reduction_of, root_of, stack
from gradmesh.runtime.mesh import AxisLike
from gradmesh.types import R
from gradmesh.verbs import collectives

__all__ = ["broadcast", "gather", "reduce", "scatter"]


def broadcast(tensor: Tensor, src: int, group: AxisLike = None) -> Tensor:
    """Send the tensor of one rank to every rank of the group.

    ::

        V at src -> R    shape (...) -> (...)    src  x0 -> x0      g0+g1 <- g0
                                                      x1 -> x0          0 <- g1

    Args:
        tensor: the value at `src`; elsewhere a tensor of the same shape and dtype, whose values are ignored.
        src: a global rank.
        group: the ranks that receive it.

    Raises:
        ArgumentError: `src` is not in the group.

    Example:
        >>> def on_each_rank():
        ...     return broadcast(torch.tensor(1.0 + gm.axis().rank), src=1).item()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [2.0, 2.0]
    """
    axis = axis_of(group, "broadcast")
    return collectives.broadcast(tensor, axis, root=root_of(src, axis, "broadcast", "src"))


def gather(tensor: Tensor, dst: int = 0, group: AxisLike = None) -> tuple[Tensor, ...]:
    """Gather all ranks' tensors on one rank; the others get zeros.

    ::

        V -> V at dst    shape (...) -> W of shape (...)    dst  x0 -> (x0, x1)      g0[0] <- (g0[0], g0[1])
                                                                 x1 -> (0, 0)        g0[1] <- (...)

    Every rank must use one of its results in its loss, because backward is a collective.

    Args:
        tensor: this rank's tensor, of the same shape on all ranks.
        dst: a global rank.
        group: the ranks to gather from.

    Raises:
        ArgumentError: `dst` is not in the group.

    Example:
        >>> def on_each_rank():
        ...     return [part.item() for part in gather(torch.tensor(1.0 + gm.axis().rank), dst=1)]
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [[0.0, 0.0], [1.0, 2.0]]
    """
    axis = axis_of(group, "gather")
    root = root_of(dst, axis, "gather", "dst")
    row = tensor.unsqueeze(0)
    stacked = apply(_ops.gather(row, axis, root), row)
    if axis.rank != root:
        # Empty sums: zeros that depend on the empty result, so that this rank takes part in backward.
        return tuple(stacked.sum(0, dtype=tensor.dtype) for _ in range(axis.size))
    return separate(stacked)


def scatter(tensors: Sequence[Tensor], src: int = 0, group: AxisLike = None) -> Tensor:
    """Send `tensors[r]` of one rank to rank r of the group.

    ::

        V at src -> V    W of shape (...) -> (...)    src  (x0, x1) -> x0      (g0, g1) <- g0
                                                           (..., ...) -> x1    (0, 0)   <- g1

    Args:
        tensors: at `src` one tensor for each rank; elsewhere as many of the same shape and dtype, as in torch, whose
            values are ignored.
        src: a global rank.
        group: the ranks that receive a tensor.

    Raises:
        ArgumentError: `src` is not in the group.
        ShapeError: `tensors` does not have one tensor for each rank, or their shapes differ.

    Example:
        >>> def on_each_rank():
        ...     rank = gm.axis().rank
        ...     return scatter([torch.tensor(rank), torch.tensor(rank + 5)], src=1).item()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [1, 6]
    """
    axis = axis_of(group, "scatter")
    root = root_of(src, axis, "scatter", "src")
    stacked = stack(tensors, axis, "scatter")
    if axis.rank != root:
        stacked = stacked[:0]
    return collectives.scatter(stacked, axis, root=root, sizes=(1,) * axis.size).squeeze(0)


def reduce(tensor: Tensor, dst: int, op: Reduction = ReduceOp.SUM, group: AxisLike = None) -> Tensor:
    """Reduce the ranks' tensors on one rank; the others get zeros.

    ::

        P -> V at dst    shape (...) -> (...)    dst  x0 -> x0+x1      g0 <- g0
                                                      x1 -> 0          g0 <- g1

    The picture is that of SUM; backward of the other ops is that of `all_reduce`.

    Args:
        tensor: this rank's term.
        dst: a global rank.
        op: SUM, AVG, MAX, MIN or PRODUCT.
        group: the ranks to combine.

    Raises:
        ArgumentError: `dst` is not in the group, or the op has no gradient rule, such as the bitwise ones.

    Example:
        >>> def on_each_rank():
        ...     return reduce(torch.tensor(1.0 + gm.axis().rank), dst=1).item()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [0.0, 3.0]
    """
    axis = axis_of(group, "reduce")
    root = root_of(dst, axis, "reduce", "dst")
    reduction = reduction_of(op, axis, "reduce")
    if reduction == "sum":
        return apply(_ops.reduce(tensor, axis, root), tensor)
    everywhere = collectives.all_reduce(tensor, axis, op=reduction, dst=R)
    elsewhere = torch.tensor(axis.rank != root, device=tensor.device)
    return everywhere.masked_fill(elsewhere, 0)
