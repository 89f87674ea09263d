"""The mappings of fairchem-core 2.11 and later that differ from earlier versions: atoms along dim 0.

In the diagrams, two ranks share a graph; g0 and g1 are their incoming gradients, g if these are equal.
"""

# The signatures are those of the original, where a tensor is called `input`.
# ruff: noqa: A002

from __future__ import annotations

from torch import Tensor

from gradmesh.compat.fairchem.functions import (
    AllReduceSumWithGrad,
    ScatterToModelParallelRegion,
    size_list_fn,
)
from gradmesh.compat.gp_utils import pad_tensor
from gradmesh.compat.gp_utils.groups import gp_axis
from gradmesh.errors import ArgumentError, message
from gradmesh.types import Convention, I, R
from gradmesh.verbs.call import integer
from gradmesh.verbs.collectives import all_gather

__all__ = [
    "all_reduce_sum_with_grad",
    "gather_from_model_parallel_region",
    "gather_from_model_parallel_region_sum_grad",
    "pad_input",
    "scatter_to_model_parallel_region",
]


def pad_input(input: Tensor, padded_size: int) -> Tensor:
    """Append zeros along dim 0.

    Args:
        input: any tensor; returned unchanged if it needs no padding.
        padded_size: the size to reach.

    Raises:
        ShapeError: the tensor is longer than `padded_size`.

    Example:
        >>> pad_input(torch.ones(2), 3)
        tensor([1., 1., 0.])
    """
    return pad_tensor(input, 0, padded_size)


def all_reduce_sum_with_grad(input: Tensor) -> Tensor:
    """Sum over the gp group, into a tensor that each rank uses differently.

    ::

        P -> R    shape (...) -> (...)    x0 -> x0+x1      g0+g1 <- g0
                                          x1 -> x0+x1      g0+g1 <- g1

    Args:
        input: this rank's term; not modified.

    Raises:
        ArgumentError: `input` is not a dense tensor.
        MismatchError: the shapes or dtypes differ (detected on some backends).

    Example:
        >>> from gradmesh.compat import fairchem
        >>> def on_each_rank():
        ...     fairchem.setup_graph_parallel_groups(2, "threads")
        ...     x = torch.tensor(1.0 + fairchem.get_gp_rank(), requires_grad=True)
        ...     ((1 + fairchem.get_gp_rank()) * all_reduce_sum_with_grad(x)).backward()
        ...     fairchem.cleanup_gp()
        ...     return x.grad.item()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [3.0, 3.0]
    """
    result: Tensor = AllReduceSumWithGrad.apply(input)
    return result


def scatter_to_model_parallel_region(input: Tensor) -> Tensor:
    """This rank's shard of dim 0 of a tensor that is replicated over the gp group.

    ::

        I -> V    shape (n, ...) -> (n / W, ...), one more on the first n % W ranks

                  [a b] -> a      [g0 g1] <- g0
                  [a b] -> b      [g0 g1] <- g1

    Args:
        input: the same tensor on every rank.

    Raises:
        ArgumentError: `input` is 0-dim.

    Example:
        >>> from gradmesh.compat import fairchem
        >>> def on_each_rank():
        ...     fairchem.setup_graph_parallel_groups(2, "threads")
        ...     part = scatter_to_model_parallel_region(torch.arange(6).view(3, 2))
        ...     fairchem.cleanup_gp()
        ...     return part.tolist()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [[[0, 1], [2, 3]], [[4, 5]]]
    """
    result: Tensor = ScatterToModelParallelRegion.apply(input)
    return result


def gather_from_model_parallel_region(input: Tensor, natoms: int) -> Tensor:
    """Concatenate the shards of the gp group along dim 0, into a tensor on which every rank does identical work.

    ::

        V -> I    shape (n_r, ...) -> (natoms, ...)    a -> [a b]      g[a] <- g
                                                       b -> [a b]      g[b] <- g

    If the work that follows differs between ranks, use `gather_from_model_parallel_region_sum_grad`: each rank then has
    only its contribution to the gradient, and this function does not sum.

    Args:
        input: this rank's shard of the even split, or that shard padded to the size of the largest.
        natoms: the number of atoms of all ranks.

    Raises:
        ArgumentError: `natoms` is not an int >= 0.
        ShapeError: `input` is neither this rank's shard of `natoms` nor that shard padded.

    Example:
        >>> from gradmesh.compat import fairchem
        >>> def on_each_rank():
        ...     fairchem.setup_graph_parallel_groups(2, "threads")
        ...     x = torch.ones(2 - fairchem.get_gp_rank(), requires_grad=True)
        ...     whole = gather_from_model_parallel_region(x, 3)
        ...     (whole * torch.tensor([3.0, 4.0, 5.0])).sum().backward()
        ...     fairchem.cleanup_gp()
        ...     return x.grad.tolist()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [[3.0, 4.0], [5.0]]
    """
    return _gather(input, natoms, I, "gather_from_model_parallel_region")


def gather_from_model_parallel_region_sum_grad(input: Tensor, natoms: int) -> Tensor:
    """Concatenate the shards of the gp group along dim 0, into a tensor that each rank uses differently.

    ::

        V -> R    shape (n_r, ...) -> (natoms, ...)    a -> [a b]      g0[a]+g1[a] <- g0
                                                       b -> [a b]      g0[b]+g1[b] <- g1

    Args:
        input: this rank's shard of the even split, or that shard padded to the size of the largest.
        natoms: the number of atoms of all ranks.

    Raises:
        ArgumentError: `natoms` is not an int >= 0.
        ShapeError: `input` is neither this rank's shard of `natoms` nor that shard padded.

    Example:
        >>> from gradmesh.compat import fairchem
        >>> def on_each_rank():
        ...     fairchem.setup_graph_parallel_groups(2, "threads")
        ...     x = torch.ones(2 - fairchem.get_gp_rank(), requires_grad=True)
        ...     whole = gather_from_model_parallel_region_sum_grad(x, 3)
        ...     ((1 + fairchem.get_gp_rank()) * whole * torch.tensor([3.0, 4.0, 5.0])).sum().backward()
        ...     fairchem.cleanup_gp()
        ...     return x.grad.tolist()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [[9.0, 12.0], [15.0]]
    """
    return _gather(input, natoms, R, "gather_from_model_parallel_region_sum_grad")


def _gather(input: Tensor, natoms: int, dst: Convention, name: str) -> Tensor:
    axis, total = gp_axis(), integer(natoms)
    if total is None or total < 0:
        raise ArgumentError(
            message(
                "natoms must be an int >= 0",
                op=f"compat.fairchem.{name}",
                axis=str(axis),
                expected="the number of atoms of all ranks, e.g. natoms=100",
                got=f"natoms={natoms!r}",
                remedy="if this is a dimension, the call is for fairchem-core up to 2.10: import\n"
                "gradmesh.compat.gp_utils instead of gradmesh.compat.fairchem",
            )
        )
    sizes = size_list_fn(total, axis.size)
    padded = input.dim() > 0 and input.size(0) == sizes[0]
    part = input.narrow(0, 0, sizes[axis.rank]) if padded else input
    return all_gather(part, axis, 0, dst=dst, sizes=sizes)
