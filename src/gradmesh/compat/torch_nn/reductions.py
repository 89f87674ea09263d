"""all_reduce and reduce_scatter."""

# The signatures are torch's own, where a tensor is called `input`.

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from gradmesh.compat.torch_nn.arguments import Reduction, axis_of, fill, one_each, reduction_of
from gradmesh.runtime.mesh import AxisLike
from gradmesh.types import R
from gradmesh.verbs import collectives

__all__ = ["all_reduce", "reduce_scatter"]


def reduce_scatter(
    output: Tensor, input_list: Sequence[Tensor], op: Reduction = ReduceOp.SUM, group: AxisLike = None
) -> Tensor:
    """Reduce `input_list[r]` of all ranks to rank r of the group.

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
        ArgumentError: an op without a gradient rule, such as the bitwise ones.
        ShapeError: `input_list` does not have one tensor for each rank, or `output` has another number of elements.

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
    if reduction == "sum" or reduction == "mean":
        mine = collectives.reduce_scatter(flat, axis, op=reduction, sizes=sizes)
    else:
        whole = collectives.all_reduce(flat, axis, op=reduction, dst=R)
        mine = whole.split(sizes)[axis.rank].clone()
    return fill(output, mine, axis, "reduce_scatter")


def all_reduce(tensor: Tensor, op: Reduction = ReduceOp.SUM, group: AxisLike = None) -> Tensor:
    """Reduce the ranks' tensors; every rank gets the result.

    ::

        P -> R    shape (...) -> (...)    x0 -> x0+x1      g0+g1 <- g0
                                          x1 -> x0+x1      g0+g1 <- g1

    The picture is that of SUM. Backward of AVG is the mean; of MAX and MIN the sum goes to the ranks that hold the
    extremum, which share it; of PRODUCT it is the product rule, correct with zeros.

    Args:
        tensor: this rank's term.
        op: SUM, AVG, MAX, MIN or PRODUCT.
        group: the ranks to combine.

    Raises:
        ArgumentError: an op without a gradient rule, such as the bitwise ones.

    Example:
        >>> def on_each_rank():
        ...     return all_reduce(torch.tensor(1.0 + gm.axis().rank), op=torch.distributed.ReduceOp.MAX).item()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [2.0, 2.0]
    """
    axis = axis_of(group, "all_reduce")
    return collectives.all_reduce(tensor, axis, op=reduction_of(op, axis, "all_reduce"), dst=R)
