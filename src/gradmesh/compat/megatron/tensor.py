"""Mappings of tensor parallel regions, along the last dimension."""

from __future__ import annotations

from torch import Tensor

from gradmesh.compat.megatron.arguments import Group, axis_of
from gradmesh.types import I, R
from gradmesh.verbs import collectives

__all__ = [
    "all_gather_last_dim_from_tensor_parallel_region",
    "copy_to_tensor_model_parallel_region",
    "gather_from_tensor_model_parallel_region",
    "reduce_from_tensor_model_parallel_region",
    "reduce_scatter_last_dim_to_tensor_parallel_region",
    "scatter_to_tensor_model_parallel_region",
]


def all_gather_last_dim_from_tensor_parallel_region(input_: Tensor, group: Group = None) -> Tensor:
    """Concatenate along the last dimension, into a tensor that each rank uses differently.

    ::

        V -> R    shape (..., n) -> (..., W n)    a -> [a b]      g0[a]+g1[a] <- g0
                                                  b -> [a b]      g0[b]+g1[b] <- g1

    Args:
        input_: this rank's shard, of the same shape on all ranks.
        group: the ranks of the tensor parallel group.

    Raises:
        MismatchError: the shapes or dtypes differ (detected on some backends).

    Example:
        >>> def on_each_rank():
        ...     return all_gather_last_dim_from_tensor_parallel_region(torch.tensor([gm.axis().rank])).tolist()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [[0, 1], [0, 1]]
    """
    return collectives.all_gather(input_, axis_of(group), -1, dst=R)


def copy_to_tensor_model_parallel_region(input_: Tensor, group: Group = None) -> Tensor:
    """Mark that the ranks use `input_` differently from here on: the identity, with summed gradients.

    ::

        I -> R    shape (...) -> (...)    x -> x      g0+g1 <- g0
                                          x -> x      g0+g1 <- g1

    Args:
        input_: the same tensor on every rank.
        group: the ranks of the tensor parallel group.

    Example:
        >>> def on_each_rank():
        ...     x = torch.tensor(2.0, requires_grad=True)
        ...     ((1 + gm.axis().rank) * copy_to_tensor_model_parallel_region(x)).backward()
        ...     return x.grad.item()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [3.0, 3.0]
    """
    return collectives.replicate(input_, axis_of(group))


def gather_from_tensor_model_parallel_region(input_: Tensor, group: Group = None) -> Tensor:
    """Concatenate along the last dimension, into a tensor on which every rank does identical work.

    ::

        V -> I    shape (..., n) -> (..., W n)    a -> [a b]      g[a] <- g
                                                  b -> [a b]      g[b] <- g

    Args:
        input_: this rank's shard, of the same shape on all ranks.
        group: the ranks of the tensor parallel group.

    Raises:
        MismatchError: the shapes or dtypes differ (detected on some backends).

    Example:
        >>> def on_each_rank():
        ...     return gather_from_tensor_model_parallel_region(torch.tensor([gm.axis().rank])).tolist()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [[0, 1], [0, 1]]
    """
    return collectives.all_gather(input_, axis_of(group), -1, dst=I)


def reduce_from_tensor_model_parallel_region(input_: Tensor, group: Group = None) -> Tensor:
    """Sum over the ranks, into a tensor on which every rank does identical work.

    ::

        P -> I    shape (...) -> (...)    x0 -> x0+x1      g <- g
                                          x1 -> x0+x1      g <- g

    Args:
        input_: this rank's term.
        group: the ranks of the tensor parallel group.

    Raises:
        MismatchError: the shapes or dtypes differ (detected on some backends).

    Example:
        >>> def on_each_rank():
        ...     return reduce_from_tensor_model_parallel_region(torch.tensor(1.0 + gm.axis().rank)).item()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [3.0, 3.0]
    """
    return collectives.all_reduce(input_, axis_of(group), dst=I)


def reduce_scatter_last_dim_to_tensor_parallel_region(input_: Tensor, group: Group = None) -> Tensor:
    """Sum over the ranks; each rank keeps its slice of the last dimension.

    ::

        P -> V    shape (..., n) -> (..., n/W)    [x0[0] x0[1]] -> x0[0]+x1[0]      [g0 g1] <- g0
                                                  [x1[0] x1[1]] -> x0[1]+x1[1]      [g0 g1] <- g1

    Args:
        input_: this rank's term of the sum, with the full last dimension.
        group: the ranks of the tensor parallel group.

    Raises:
        ShapeError: the last dimension is not divisible by the number of ranks.

    Example:
        >>> def on_each_rank():
        ...     return reduce_scatter_last_dim_to_tensor_parallel_region(torch.arange(4.0)).tolist()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [[0.0, 2.0], [4.0, 6.0]]
    """
    return collectives.reduce_scatter(input_, axis_of(group), -1)


def scatter_to_tensor_model_parallel_region(input_: Tensor, group: Group = None) -> Tensor:
    """This rank's slice of the last dimension.

    ::

        I -> V    shape (..., n) -> (..., n/W)    [a b] -> a      [g0 g1] <- g0
                                                  [a b] -> b      [g0 g1] <- g1

    Args:
        input_: the same tensor on every rank.
        group: the ranks of the tensor parallel group.

    Example:
        >>> def on_each_rank():
        ...     return scatter_to_tensor_model_parallel_region(torch.arange(4)).tolist()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [[0, 1], [2, 3]]
    """
    return collectives.shard(input_, axis_of(group), -1)
