"""The mappings of graph parallelism that models call.

In the diagrams, two ranks share a graph; g0 and g1 are their incoming gradients, g if these are equal.
"""

# The signatures are those of the original, where a tensor is called `input`.
# ruff: noqa: A002

from __future__ import annotations

from torch import Tensor

from gradmesh.compat.gp_utils.functions import (
    CopyToModelParallelRegion,
    GatherFromModelParallelRegion,
    GatherFromModelParallelRegionSumGrad,
    ReduceFromModelParallelRegion,
    ScaleBackwardGrad,
    ScatterToModelParallelRegion,
)
from gradmesh.compat.gp_utils.groups import gp_axis
from gradmesh.errors import ArgumentError, message

__all__ = [
    "copy_to_model_parallel_region",
    "gather_from_model_parallel_region",
    "gather_from_model_parallel_region_sum_grad",
    "reduce_from_model_parallel_region",
    "scale_backward_grad",
    "scatter_to_model_parallel_region",
]


def copy_to_model_parallel_region(input: Tensor) -> Tensor:
    """Mark that the ranks of the gp group use `input` differently from here on: the identity, with summed gradients.

    For replicated tensors that enter graph parallel work.

    ::

        I -> R    shape (...) -> (...)    x -> x      g0+g1 <- g0
                                          x -> x      g0+g1 <- g1

    Args:
        input: the same tensor on every rank of the group.

    Raises:
        ArgumentError: `input` is not a dense tensor.

    Example:
        >>> from gradmesh.compat import gp_utils
        >>> def on_each_rank():
        ...     gp_utils.setup_graph_parallel_groups(2, "threads")
        ...     x = torch.tensor(2.0, requires_grad=True)
        ...     ((1 + gp_utils.get_gp_rank()) * copy_to_model_parallel_region(x)).backward()
        ...     gp_utils.cleanup_gp()
        ...     return x.grad.item()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [3.0, 3.0]
    """
    result: Tensor = CopyToModelParallelRegion.apply(input)
    return result


def reduce_from_model_parallel_region(input: Tensor) -> Tensor:
    """Sum over the gp group, into a tensor on which every rank does identical work.

    ::

        P -> I    shape (...) -> (...)    x0 -> x0+x1      g <- g
                                          x1 -> x0+x1      g <- g

    Args:
        input: this rank's term; not modified.

    Raises:
        ArgumentError: `input` is not a dense tensor.
        MismatchError: the shapes or dtypes differ (detected on some backends).

    Example:
        >>> from gradmesh.compat import gp_utils
        >>> def on_each_rank():
        ...     gp_utils.setup_graph_parallel_groups(2, "threads")
        ...     x = torch.tensor(1.0 + gp_utils.get_gp_rank(), requires_grad=True)
        ...     energy = reduce_from_model_parallel_region(x**2)
        ...     energy.backward()
        ...     gp_utils.cleanup_gp()
        ...     return energy.item(), x.grad.item()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [(5.0, 2.0), (5.0, 4.0)]
    """
    result: Tensor = ReduceFromModelParallelRegion.apply(input)
    return result


def scatter_to_model_parallel_region(input: Tensor, dim: int = -1) -> Tensor:
    """This rank's shard along `dim` of a tensor that is replicated over the gp group.

    ::

        I -> V    shape (n, ...) -> (ceil(n / W), ...), less or 0 on the last ranks

                  [a b] -> a      [g0 g1] <- g0
                  [a b] -> b      [g0 g1] <- g1

    Args:
        input: the same tensor on every rank.
        dim: the dimension to split, the last one by default. fairchem-core 2.11 and later has no `dim` and splits the
            first one: see `gradmesh.compat.fairchem`.

    Raises:
        ArgumentError: `dim` is out of range.

    Example:
        >>> from gradmesh.compat import gp_utils
        >>> def on_each_rank():
        ...     gp_utils.setup_graph_parallel_groups(2, "threads")
        ...     part = scatter_to_model_parallel_region(torch.arange(3), dim=0)
        ...     gp_utils.cleanup_gp()
        ...     return part.tolist()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [[0, 1], [2]]
    """
    result: Tensor = ScatterToModelParallelRegion.apply(input, dim)
    return result


def gather_from_model_parallel_region(input: Tensor, dim: int = -1, natoms: None = None) -> Tensor:
    """Concatenate the shards of the gp group, into a tensor on which every rank does identical work.

    ::

        V -> I    shape (n_r, ...) -> (n_0 + ... + n_W-1, ...)    a -> [a b]      g[a] <- g
                                                                  b -> [a b]      g[b] <- g

    The gradient of the result is complete on every rank, so backward takes the local slice without a sum. If the work
    that follows differs between ranks, each rank has only its contribution to the gradient: use
    `gather_from_model_parallel_region_sum_grad`, or call `copy_to_model_parallel_region` on the result.

    Args:
        input: this rank's shard; its size along `dim` may differ between ranks.
        dim: the dimension to concatenate along.
        natoms: not supported; the argument of fairchem-core 2.11 and later, see `gradmesh.compat.fairchem`.

    Raises:
        ArgumentError: `dim` is out of range, or `natoms` is given.
        MismatchError: other sizes or dtypes differ (detected on some backends).

    Example:
        >>> from gradmesh.compat import gp_utils
        >>> def on_each_rank():
        ...     gp_utils.setup_graph_parallel_groups(2, "threads")
        ...     x = torch.ones(1 + gp_utils.get_gp_rank(), requires_grad=True)
        ...     whole = gather_from_model_parallel_region(x, dim=0)
        ...     (whole * torch.tensor([3.0, 4.0, 5.0])).sum().backward()
        ...     gp_utils.cleanup_gp()
        ...     return x.grad.tolist()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [[3.0], [4.0, 5.0]]
    """
    _refuse_natoms(input, dim, natoms, "gather_from_model_parallel_region")
    result: Tensor = GatherFromModelParallelRegion.apply(input, dim)
    return result


def gather_from_model_parallel_region_sum_grad(input: Tensor, dim: int = -1, natoms: None = None) -> Tensor:
    """Concatenate the shards of the gp group, into a tensor that each rank uses differently.

    ::

        V -> R    shape (n_r, ...) -> (n_0 + ... + n_W-1, ...)    a -> [a b]      g0[a]+g1[a] <- g0
                                                                  b -> [a b]      g0[b]+g1[b] <- g1

    Args:
        input: this rank's shard; its size along `dim` may differ between ranks.
        dim: the dimension to concatenate along.
        natoms: not supported; the argument of fairchem-core 2.11 and later, see `gradmesh.compat.fairchem`.

    Raises:
        ArgumentError: `dim` is out of range, or `natoms` is given.
        MismatchError: other sizes or dtypes differ (detected on some backends).

    Example:
        >>> from gradmesh.compat import gp_utils
        >>> def on_each_rank():
        ...     gp_utils.setup_graph_parallel_groups(2, "threads")
        ...     x = torch.ones(1 + gp_utils.get_gp_rank(), requires_grad=True)
        ...     whole = gather_from_model_parallel_region_sum_grad(x, dim=0)
        ...     ((1 + gp_utils.get_gp_rank()) * whole * torch.tensor([3.0, 4.0, 5.0])).sum().backward()
        ...     gp_utils.cleanup_gp()
        ...     return x.grad.tolist()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [[9.0], [12.0, 15.0]]
    """
    _refuse_natoms(input, dim, natoms, "gather_from_model_parallel_region_sum_grad")
    result: Tensor = GatherFromModelParallelRegionSumGrad.apply(input, dim)
    return result


def scale_backward_grad(input: Tensor) -> Tensor:
    """Scale the gradient of a loss by the number of ranks of the gp group.

    For a data parallel wrapper that averages gradients over all ranks of the world, while the W ranks of a graph share
    one loss: without this factor, the average is W times too small.

    ::

        I -> R    shape (...) -> (...)    x -> x      W g <- g
                                          x -> x      W g <- g

    It is `copy_to_model_parallel_region` without communication, for a result whose gradient is the same on every rank.
    The derivative of this gradient is W times the second derivative. (The original's is W * W times that: its backward
    scales again.)

    Args:
        input: the same on every rank of the group; the gradient of the result must be the same too.

    Example:
        >>> from gradmesh.compat import gp_utils
        >>> def on_each_rank():
        ...     gp_utils.setup_graph_parallel_groups(2, "threads")
        ...     x = torch.tensor(3.0, requires_grad=True)
        ...     loss = scale_backward_grad(x**2)
        ...     loss.backward()
        ...     gp_utils.cleanup_gp()
        ...     return loss.item(), x.grad.item()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [(9.0, 12.0), (9.0, 12.0)]
    """
    result: Tensor = ScaleBackwardGrad.apply(input)
    return result


def _refuse_natoms(input: Tensor, dim: int, natoms: object, name: str) -> None:
    """Raise for calls with arguments of fairchem-core 2.11 and later, if they can be recognized."""
    inside = not isinstance(dim, int) or -input.dim() <= dim < input.dim()
    if natoms is None and inside:
        return
    raise ArgumentError(
        message(
            "natoms is not supported" if natoms is not None else "dim is out of range",
            op=f"compat.gp_utils.{name}",
            axis=str(gp_axis()),
            expected=f"(input, dim), with {-input.dim()} <= dim < {input.dim()} for a {input.dim()}-d tensor",
            got=f"natoms={natoms!r}" if natoms is not None else f"dim={dim!r} for shape {tuple(input.shape)}",
            remedy="if this is a number of atoms, the call is for fairchem-core 2.11 or later: import\n"
            "gradmesh.compat.fairchem instead of gradmesh.compat.gp_utils",
        )
    )
