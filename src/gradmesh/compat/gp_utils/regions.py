"""The regions of graph parallel work: the functions that models call.

In the pictures two ranks share a graph; g0 and g1 are the gradients that come in on them, and g where they are equal.
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
    """Say that the ranks of the gp group use `input` differently from here on.

    The way of a tensor that every rank holds into work that is split over the graph.

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
    """Sum over the gp group, into a tensor on which every rank repeats the same work.

    ::

        P -> I    shape (...) -> (...)    x0 -> x0+x1      g <- g
                                          x1 -> x0+x1      g <- g

    Args:
        input: this rank's term, which is only read.

    Raises:
        ArgumentError: `input` is not a dense tensor.
        MismatchError: the shapes or dtypes differ (on backends that can tell).

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
    """Keep the own part along `dim` of a tensor that every rank of the gp group holds.

    ::

        I -> V    shape (n, ...) -> (ceil(n / W), ...), less or nothing on the last ranks

                  [a b] -> a      [g0 g1] <- g0
                  [a b] -> b      [g0 g1] <- g1

    Args:
        input: the same tensor on every rank.
        dim: the dimension to cut, the last one by default. fairchem-core 2.11 and later has no `dim` and cuts the
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
    """Concatenate the parts of the gp group, into a tensor on which every rank repeats the same work.

    ::

        V -> I    shape (n_r, ...) -> (n_0 + ... + n_W-1, ...)    a -> [a b]      g[a] <- g
                                                                  b -> [a b]      g[b] <- g

    The gradient of an I result is whole on every rank, so each takes the slice that is its own and nothing is summed.
    Where the work that follows differs from rank to rank, every rank has only its own term of that gradient: use
    `gather_from_model_parallel_region_sum_grad` there, or put `copy_to_model_parallel_region` behind this.

    Args:
        input: this rank's part; its size along `dim` may differ from rank to rank.
        dim: the dimension to join along.
        natoms: not taken: the argument of fairchem-core 2.11 and later, for which there is `gradmesh.compat.fairchem`.

    Raises:
        ArgumentError: `dim` is out of range, or `natoms` is given.
        MismatchError: other sizes or dtypes differ (on backends that can tell).

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
    """Concatenate the parts of the gp group, into a tensor that each rank uses differently.

    ::

        V -> R    shape (n_r, ...) -> (n_0 + ... + n_W-1, ...)    a -> [a b]      g0[a]+g1[a] <- g0
                                                                  b -> [a b]      g0[b]+g1[b] <- g1

    Args:
        input: this rank's part; its size along `dim` may differ from rank to rank.
        dim: the dimension to join along.
        natoms: not taken: the argument of fairchem-core 2.11 and later, for which there is `gradmesh.compat.fairchem`.

    Raises:
        ArgumentError: `dim` is out of range, or `natoms` is given.
        MismatchError: other sizes or dtypes differ (on backends that can tell).

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
    """Count a loss once for each rank of the gp group.

    For a data parallel wrapper that averages gradients over all ranks of the world, although the W ranks of a graph
    have one loss between them: without it the average is W times too small.

    ::

        I -> R    shape (...) -> (...)    x -> x      W g <- g
                                          x -> x      W g <- g

    It is `copy_to_model_parallel_region` for a result whose gradient is the same on every rank, without the message.
    The derivative of this gradient is W times the second derivative. (The original's is W * W times that, as its
    backward scales once more.)

    Args:
        input: the same on every rank of the group, as the gradient of the result has to be.

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
    """Refuse a call that is meant for fairchem-core 2.11 and later, where it can be told from ours."""
    inside = not isinstance(dim, int) or -input.dim() <= dim < input.dim()
    if natoms is None and inside:
        return
    raise ArgumentError(
        message(
            "natoms is not taken" if natoms is not None else "dim is out of range",
            op=f"compat.gp_utils.{name}",
            axis=str(gp_axis()),
            expected=f"(input, dim), with {-input.dim()} <= dim < {input.dim()} for a {input.dim()}-d tensor",
            got=f"natoms={natoms!r}" if natoms is not None else f"dim={dim!r} for shape {tuple(input.shape)}",
            remedy="if this is a number of atoms, the call is one of fairchem-core 2.11 or later: import\n"
            "gradmesh.compat.fairchem in the place of gradmesh.compat.gp_utils",
        )
    )
