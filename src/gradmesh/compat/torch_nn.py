"""Drop-in for `torch.distributed.nn.functional`: the same functions, with right gradients at every order.

=====================  =========  ====================================================================
function               type       backward
=====================  =========  ====================================================================
`all_gather`           V -> R     the sum over the ranks of the own tensor's gradients
`_all_gather_base`     V -> R     the same
`all_reduce`           P -> R     the sum for SUM, its mean for AVG; for MAX and MIN the ranks that hold the
                                  extremum share it; for PRODUCT the product rule, right with zeros
`all_to_all`           V -> V     the way back
`all_to_all_single`    V -> V     the way back
`broadcast`            V -> R     the sum at `src`, zeros elsewhere
`gather`               V -> V     each rank's part of the gradient at `dst`
`reduce`               P -> V     the gradient at `dst`, through the same rules as `all_reduce`
`reduce_scatter`       P -> V     concatenates
`scatter`              V -> V     the gradients of all ranks, at `src`
=====================  =========  ====================================================================

What stays as in torch: the signatures; `src` and `dst` are ranks of the world; the results' shapes, zeros where
`gather` and `reduce` have no result; backward sums over ranks, as is right for losses that differ; a tensor given as
`output` is filled, without a gradient, while the tensor that is returned has one.

What is new: a group is looked up when the function is called, and None is the world; anything that
`gradmesh.axis` takes will do for it. Every function and its gradient run on every backend, and no call warns.
"""

# The signatures are torch's own, where a tensor is called `input`.
# ruff: noqa: A002

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from gradmesh import collectives
from gradmesh.autograd import apply
from gradmesh.axis import AxisLike
from gradmesh.compat import _ops
from gradmesh.compat._torch_arguments import (
    Reduction,
    axis_of,
    equal,
    fill,
    one_each,
    reduction_of,
    root_of,
    stack,
)
from gradmesh.compat.ksuit import separate
from gradmesh.types import R

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "scatter",
]


def broadcast(tensor: Tensor, src: int, group: AxisLike = None) -> Tensor:
    """Give every rank of the group the tensor of one rank.

    ::

        V at src -> R    shape (...) -> (...)    src  x0 -> x0      g0+g1 <- g0
                                                      x1 -> x0          0 <- g1

    Args:
        tensor: the value at `src`; elsewhere a tensor of the same shape and dtype, whose values do not count.
        src: a rank of the world.
        group: the ranks that get it.

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
    """Give one rank every rank's tensor; the others get zeros.

    ::

        V -> V at dst    shape (...) -> W of shape (...)    dst  x0 -> (x0, x1)      g0[0] <- (g0[0], g0[1])
                                                                 x1 -> (0, 0)        g0[1] <- (...)

    Every rank has to use one of its results in its loss, since the backward collective needs all ranks.

    Args:
        tensor: this rank's tensor, of one shape on all ranks.
        dst: a rank of the world.
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
        # Sums over nothing: zeros that hang on the empty result, or this rank would miss the backward collective.
        return tuple(stacked.sum(0, dtype=tensor.dtype) for _ in range(axis.size))
    return separate(stacked)


def scatter(tensors: Sequence[Tensor], src: int = 0, group: AxisLike = None) -> Tensor:
    """Give rank r of the group `tensors[r]` of one rank.

    ::

        V at src -> V    W of shape (...) -> (...)    src  (x0, x1) -> x0      (g0, g1) <- g0
                                                           (..., ...) -> x1    (0, 0)   <- g1

    Args:
        tensors: at `src` one tensor for each rank; elsewhere as many of the same shape and dtype, as torch's own needs
            them to be, whose values do not count.
        src: a rank of the world.
        group: the ranks that get a part.

    Raises:
        ArgumentError: `src` is not in the group.
        ShapeError: not one tensor for each rank, or tensors of different shapes.

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
    """Combine the ranks' tensors at one rank; the others get zeros.

    ::

        P -> V at dst    shape (...) -> (...)    dst  x0 -> x0+x1      g0 <- g0
                                                      x1 -> 0          g0 <- g1

    The picture is that of SUM; backward of the other ops is that of `all_reduce`.

    Args:
        tensor: this rank's term.
        dst: a rank of the world.
        op: SUM, AVG, MAX, MIN or PRODUCT.
        group: the ranks to combine.

    Raises:
        ArgumentError: `dst` is not in the group, or an op that has no gradient rule, such as the bitwise ones.

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


def reduce_scatter(
    output: Tensor, input_list: Sequence[Tensor], op: Reduction = ReduceOp.SUM, group: AxisLike = None
) -> Tensor:
    """Combine the ranks' `input_list[r]` on rank r of the group.

    ::

        P -> V    W of shape (...) -> (...)    (x0[0], x0[1]) -> x0[0]+x1[0]      (g0, g1) <- g0
                                               (x1[0], x1[1]) -> x0[1]+x1[1]      (g0, g1) <- g1

    The picture is that of SUM; backward of the other ops is that of `all_reduce`.

    Args:
        output: filled with the result.
        input_list: one term for each rank; they may have different shapes, the same ones on every rank.
        op: SUM, AVG, MAX, MIN or PRODUCT.
        group: the ranks to combine.

    Raises:
        ArgumentError: an op that has no gradient rule, such as the bitwise ones.
        ShapeError: not one tensor for each rank, or an output that does not fit.

    Example:
        >>> def on_each_rank():
        ...     terms = [torch.tensor(1.0), torch.tensor(2.0 + gm.axis().rank)]
        ...     return reduce_scatter(torch.empty(()), terms).item()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [2.0, 5.0]
    """
    axis = axis_of(group, "reduce_scatter")
    reduction = reduction_of(op, axis, "reduce_scatter")
    one_each(input_list, axis, "reduce_scatter")
    flat = torch.cat([part.reshape(-1) for part in input_list])
    sizes = [part.numel() for part in input_list]
    if reduction in ("sum", "mean"):
        mine = collectives.reduce_scatter(flat, axis, op=reduction, sizes=sizes)
    else:
        whole = collectives.all_reduce(flat, axis, op=reduction, dst=R)
        mine = whole.split(sizes)[axis.rank].clone()
    return fill(output, mine, axis, "reduce_scatter")


def all_gather(tensor: Tensor, group: AxisLike = None) -> tuple[Tensor, ...]:
    """Give every rank all ranks' tensors.

    ::

        V -> R    shape (...) -> W of shape (...)    x0 -> (x0, x1)      g0[0]+g1[0] <- (g0[0], g0[1])
                                                     x1 -> (x0, x1)      g0[1]+g1[1] <- (g1[0], g1[1])

    Args:
        tensor: this rank's tensor, of one shape on all ranks.
        group: the ranks to gather from.

    Raises:
        MismatchError: the shapes differ (on backends that can tell).

    Example:
        >>> def on_each_rank():
        ...     return [part.item() for part in all_gather(torch.tensor(gm.axis().rank))]
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [[0, 1], [0, 1]]
    """
    axis = axis_of(group, "all_gather")
    return separate(collectives.all_gather(tensor.unsqueeze(0), axis))


def _all_gather_base(output_tensor: Tensor, input_tensor: Tensor, group: AxisLike = None) -> Tensor:
    """Give every rank all ranks' tensors in one.

    ::

        V -> R    shape (n, ...) -> (W n, ...)    x0 -> [x0 x1]      g0[0]+g1[0] <- [g0[0] g0[1]]
                                                  x1 -> [x0 x1]      g0[1]+g1[1] <- [g1[0] g1[1]]

    Args:
        output_tensor: filled with the result, whose shape is its own: any with W times the elements.
        input_tensor: this rank's tensor, of one shape on all ranks.
        group: the ranks to gather from.

    Raises:
        ShapeError: an output that does not fit.

    Example:
        >>> def on_each_rank():
        ...     return _all_gather_base(torch.empty(2), torch.tensor([1.0 + gm.axis().rank])).tolist()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [[1.0, 2.0], [1.0, 2.0]]
    """
    axis = axis_of(group, "_all_gather_base")
    flat = collectives.all_gather(input_tensor.reshape(-1), axis)
    return fill(output_tensor, flat, axis, "_all_gather_base")


def all_to_all(
    output_tensor_list: Sequence[Tensor], input_tensor_list: Sequence[Tensor], group: AxisLike = None
) -> tuple[Tensor, ...]:
    """Give rank r of the group `input_tensor_list[r]` of every rank.

    ::

        V -> V    W of any shapes -> W of any shapes    (a0, a1) -> (a0, b0)      (g0[0], g1[0]) <- (g0[0], g0[1])
                                                        (b0, b1) -> (a1, b1)      (g0[1], g1[1]) <- (g1[0], g1[1])

    Args:
        output_tensor_list: filled with the results.
        input_tensor_list: one tensor for each rank.
        group: the ranks to exchange among.

    Returns:
        What came from each rank, in the shapes of `output_tensor_list`, which may all differ.

    Raises:
        ShapeError: not one tensor for each rank, or outputs that do not fit.

    Example:
        >>> def on_each_rank():
        ...     mine = list(10.0 * gm.axis().rank + torch.arange(2.0))
        ...     return [part.item() for part in all_to_all(list(torch.empty(2)), mine)]
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [[0.0, 10.0], [1.0, 11.0]]
    """
    axis = axis_of(group, "all_to_all")
    one_each(output_tensor_list, axis, "all_to_all")
    one_each(input_tensor_list, axis, "all_to_all")
    send = [part.numel() for part in input_tensor_list]
    receive = [part.numel() for part in output_tensor_list]
    flat = torch.cat([part.reshape(-1) for part in input_tensor_list])
    got = collectives.all_to_all(flat, axis, split_sizes=send, concat_sizes=receive)
    parts = got.unsafe_split_with_sizes(receive)
    return tuple(
        fill(output, part, axis, "all_to_all") for output, part in zip(output_tensor_list, parts, strict=True)
    )


def all_to_all_single(
    output: Tensor,
    input: Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: AxisLike = None,
) -> Tensor:
    """Give rank r of the group the r-th part of `input` along dim 0.

    ::

        V -> V    shape (n, ...) -> (m, ...)    [a0 a1] -> [a0 b0]      [g0[0] g1[0]] <- [g0[0] g0[1]]
                                                [b0 b1] -> [a1 b1]      [g0[1] g1[1]] <- [g1[0] g1[1]]

    Args:
        output: filled with the result.
        input: the parts for all ranks.
        output_split_sizes: the size of the part from each rank; None or empty: equal parts.
        input_split_sizes: the size of the part for each rank; None or empty: equal parts.
        group: the ranks to exchange among.

    Raises:
        ShapeError: sizes that do not add up, or an output that does not fit.

    Example:
        >>> def on_each_rank():
        ...     return all_to_all_single(torch.empty(2), 10 * gm.axis().rank + torch.arange(2.0)).tolist()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [[0.0, 10.0], [1.0, 11.0]]
    """
    axis = axis_of(group, "all_to_all_single")
    receive = output_split_sizes or equal(output, axis)
    send = input_split_sizes or None
    got = collectives.all_to_all(input, axis, split_sizes=send, concat_sizes=receive)
    return fill(output, got, axis, "all_to_all_single")


def all_reduce(tensor: Tensor, op: Reduction = ReduceOp.SUM, group: AxisLike = None) -> Tensor:
    """Combine the ranks' tensors; every rank gets the result.

    ::

        P -> R    shape (...) -> (...)    x0 -> x0+x1      g0+g1 <- g0
                                          x1 -> x0+x1      g0+g1 <- g1

    The picture is that of SUM. Backward of AVG is the mean; of MAX and MIN the sum goes to the ranks that hold the
    extremum, which share it; of PRODUCT it is the product rule, right with zeros.

    Args:
        tensor: this rank's term.
        op: SUM, AVG, MAX, MIN or PRODUCT.
        group: the ranks to combine.

    Raises:
        ArgumentError: an op that has no gradient rule, such as the bitwise ones.

    Example:
        >>> def on_each_rank():
        ...     return all_reduce(torch.tensor(1.0 + gm.axis().rank), op=ReduceOp.MAX).item()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [2.0, 2.0]
    """
    axis = axis_of(group, "all_reduce")
    return collectives.all_reduce(tensor, axis, op=reduction_of(op, axis, "all_reduce"), dst=R)
