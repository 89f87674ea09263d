"""Drop-in for `megatron.core.tensor_parallel.mappings`: the regions of tensor and sequence parallelism.

==================================================  ========  =============================  =====================
name                                                type      forward                        backward
==================================================  ========  =============================  =====================
`copy_to_tensor_model_parallel_region`              I -> R    identity                       sum
`reduce_from_tensor_model_parallel_region`          P -> I    sum                            identity
`scatter_to_tensor_model_parallel_region`           I -> V    own part of the last dim       concatenate
`gather_from_tensor_model_parallel_region`          V -> I    concatenate along the last     own part
`all_gather_last_dim_from_tensor_parallel_region`   V -> R    concatenate along the last     sum, own part
`reduce_scatter_last_dim_to_tensor_parallel_region` P -> V    sum, own part of the last      concatenate
`scatter_to_sequence_parallel_region`               I -> V    own part of the first dim      concatenate
`gather_from_sequence_parallel_region`              V -> R    concatenate along the first    sum, own part
the same, `tensor_parallel_output_grad=False`       V -> I    concatenate along the first    own part
`reduce_scatter_to_sequence_parallel_region`        P -> V    sum, own part of the first     concatenate
`all_to_all`                                        V -> V    exchange parts of the first    the way back
`all_to_all_sp2hp`                                  V -> V    rows whole, columns cut        `all_to_all_hp2sp`
`all_to_all_hp2sp`                                  V -> V    columns whole, rows cut        `all_to_all_sp2hp`
==================================================  ========  =============================  =====================

`group` is a ProcessGroup or whatever else `gradmesh.axis` takes. None is the axis "tp" of the current mesh if it has
one, else the current mesh's only axis, else the world. Results are always fresh memory, also on a group of one rank,
and no gradient is summed in place.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import SupportsInt

from torch import Tensor

from gradmesh import collectives
from gradmesh.axis import Axis, AxisLike, resolve
from gradmesh.types import I, R
from gradmesh.world import current_mesh

__all__ = [
    "all_gather_last_dim_from_tensor_parallel_region",
    "all_to_all",
    "all_to_all_hp2sp",
    "all_to_all_sp2hp",
    "copy_to_tensor_model_parallel_region",
    "gather_from_sequence_parallel_region",
    "gather_from_tensor_model_parallel_region",
    "reduce_from_tensor_model_parallel_region",
    "reduce_scatter_last_dim_to_tensor_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
    "scatter_to_sequence_parallel_region",
    "scatter_to_tensor_model_parallel_region",
]


# Megatron passes lists, NumPy arrays and tensors.
Sizes = Iterable[SupportsInt] | None


def copy_to_tensor_model_parallel_region(input_: Tensor, group: AxisLike = None) -> Tensor:
    """Say that the ranks use `input_` differently from here on.

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
    return collectives.replicate(input_, _axis(group))


def reduce_from_tensor_model_parallel_region(input_: Tensor, group: AxisLike = None) -> Tensor:
    """Sum over the ranks, into a tensor on which every rank repeats the same work.

    ::

        P -> I    shape (...) -> (...)    x0 -> x0+x1      g <- g
                                          x1 -> x0+x1      g <- g


    Args:
        input_: this rank's term.
        group: the ranks of the tensor parallel group.

    Raises:
        MismatchError: the shapes or dtypes differ (on backends that can tell).

    Example:
        >>> def on_each_rank():
        ...     return reduce_from_tensor_model_parallel_region(torch.tensor(1.0 + gm.axis().rank)).item()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [3.0, 3.0]
    """
    return collectives.all_reduce(input_, _axis(group), dst=I)


def scatter_to_tensor_model_parallel_region(input_: Tensor, group: AxisLike = None) -> Tensor:
    """Keep the own part of the last dimension.

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
    return collectives.shard(input_, _axis(group), -1)


def gather_from_tensor_model_parallel_region(input_: Tensor, group: AxisLike = None) -> Tensor:
    """Concatenate along the last dimension, into a tensor on which every rank repeats the same work.

    ::

        V -> I    shape (..., n) -> (..., W n)    a -> [a b]      g[a] <- g
                                                  b -> [a b]      g[b] <- g


    Args:
        input_: this rank's part, of one shape on all ranks.
        group: the ranks of the tensor parallel group.

    Raises:
        MismatchError: the shapes or dtypes differ (on backends that can tell).

    Example:
        >>> def on_each_rank():
        ...     return gather_from_tensor_model_parallel_region(torch.tensor([gm.axis().rank])).tolist()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [[0, 1], [0, 1]]
    """
    return collectives.all_gather(input_, _axis(group), -1, dst=I)


def scatter_to_sequence_parallel_region(input_: Tensor, group: AxisLike = None) -> Tensor:
    """Keep the own part of the first dimension.

    ::

        I -> V    shape (n, ...) -> (n/W, ...)    [a b] -> a      [g0 g1] <- g0
                                                  [a b] -> b      [g0 g1] <- g1


    Args:
        input_: the same tensor on every rank.
        group: the ranks of the tensor parallel group.

    Example:
        >>> def on_each_rank():
        ...     return scatter_to_sequence_parallel_region(torch.arange(4)).tolist()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [[0, 1], [2, 3]]
    """
    return collectives.shard(input_, _axis(group), 0)


def gather_from_sequence_parallel_region(
    input_: Tensor,
    tensor_parallel_output_grad: bool = True,
    group: AxisLike = None,
    output_split_sizes: Sizes = None,
    use_global_buffer: bool = False,  # noqa: ARG001 - a choice of memory; results are always fresh here
) -> Tensor:
    """Concatenate along the first dimension.

    ::

        V -> R    shape (n, ...) -> (W n, ...)    a -> [a b]      g0[a]+g1[a] <- g0
                                                  b -> [a b]      g0[b]+g1[b] <- g1

        V -> I    the same forward; backward is the own part, g[a] and g[b]


    Args:
        input_: this rank's part.
        tensor_parallel_output_grad: whether tensor parallel work follows, which uses the result differently on each
            rank. If so backward sums over the ranks (V -> R), else it hands back the own part (V -> I).
        group: the ranks to gather from.
        output_split_sizes: each rank's size along the first dimension; None: the same on every rank.
        use_global_buffer: taken and not used.

    Raises:
        ShapeError: `input_` is not what `output_split_sizes` says.

    Example:
        >>> def on_each_rank():
        ...     x = torch.tensor([1.0], requires_grad=True)
        ...     ((1 + gm.axis().rank) * gather_from_sequence_parallel_region(x)).sum().backward()
        ...     return x.grad.tolist()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [[3.0], [3.0]]
    """
    dst = R if tensor_parallel_output_grad else I
    return collectives.all_gather(input_, _axis(group), 0, dst=dst, sizes=_ints(output_split_sizes))


def reduce_scatter_to_sequence_parallel_region(
    input_: Tensor,
    group: AxisLike = None,
    input_split_sizes: Sizes = None,
    use_global_buffer: bool = False,  # noqa: ARG001 - a choice of memory; results are always fresh here
) -> Tensor:
    """Sum over the ranks, of which each keeps its part of the first dimension.

    ::

        P -> V    shape (n, ...) -> (n/W, ...)    [x0[0] x0[1]] -> x0[0]+x1[0]      [g0 g1] <- g0
                                                  [x1[0] x1[1]] -> x0[1]+x1[1]      [g0 g1] <- g1


    Args:
        input_: this rank's term of the sum, whole along the first dimension.
        group: the ranks to sum over.
        input_split_sizes: the size of each rank's part; None: equal parts.
        use_global_buffer: taken and not used.

    Raises:
        ShapeError: sizes that do not add up, or none and the ranks do not divide the first dimension.

    Example:
        >>> def on_each_rank():
        ...     return reduce_scatter_to_sequence_parallel_region(torch.arange(4.0)).tolist()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [[0.0, 2.0], [4.0, 6.0]]
    """
    return collectives.reduce_scatter(input_, _axis(group), 0, sizes=_ints(input_split_sizes))


def all_gather_last_dim_from_tensor_parallel_region(input_: Tensor, group: AxisLike = None) -> Tensor:
    """Concatenate along the last dimension, into a tensor that each rank uses differently.

    ::

        V -> R    shape (..., n) -> (..., W n)    a -> [a b]      g0[a]+g1[a] <- g0
                                                  b -> [a b]      g0[b]+g1[b] <- g1


    Args:
        input_: this rank's part, of one shape on all ranks.
        group: the ranks of the tensor parallel group.

    Raises:
        MismatchError: the shapes or dtypes differ (on backends that can tell).

    Example:
        >>> def on_each_rank():
        ...     return all_gather_last_dim_from_tensor_parallel_region(torch.tensor([gm.axis().rank])).tolist()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [[0, 1], [0, 1]]
    """
    return collectives.all_gather(input_, _axis(group), -1, dst=R)


def reduce_scatter_last_dim_to_tensor_parallel_region(input_: Tensor, group: AxisLike = None) -> Tensor:
    """Sum over the ranks, of which each keeps its part of the last dimension.

    ::

        P -> V    shape (..., n) -> (..., n/W)    [x0[0] x0[1]] -> x0[0]+x1[0]      [g0 g1] <- g0
                                                  [x1[0] x1[1]] -> x0[1]+x1[1]      [g0 g1] <- g1


    Args:
        input_: this rank's term of the sum, whole along the last dimension.
        group: the ranks of the tensor parallel group.

    Raises:
        ShapeError: the ranks do not divide that dimension.

    Example:
        >>> def on_each_rank():
        ...     return reduce_scatter_last_dim_to_tensor_parallel_region(torch.arange(4.0)).tolist()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [[0.0, 2.0], [4.0, 6.0]]
    """
    return collectives.reduce_scatter(input_, _axis(group), -1)


def all_to_all(
    group: AxisLike,
    input_: Tensor,
    output_split_sizes_: Sizes = None,
    input_split_sizes: Sizes = None,
) -> Tensor:
    """Give rank r the r-th part of the first dimension.

    ::

        V -> V    shape (n, ...) -> (m, ...)    [a0 a1] -> [a0 b0]      [g0[0] g1[0]] <- [g0[0] g0[1]]
                                                [b0 b1] -> [a1 b1]      [g0[1] g1[1]] <- [g1[0] g1[1]]


    Args:
        group: the ranks to exchange among.
        input_: the parts for all ranks.
        output_split_sizes_: the size of the part from each rank; None: equal parts. (The original has the underscore.)
        input_split_sizes: the size of the part for each rank; None: equal parts.

    Raises:
        ShapeError: sizes that do not add up, or none and the ranks do not divide the first dimension.

    Example:
        >>> def on_each_rank():
        ...     return all_to_all(None, 10 * gm.axis().rank + torch.arange(2)).tolist()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [[0, 10], [1, 11]]
    """
    send, receive = _ints(input_split_sizes), _ints(output_split_sizes_)
    return collectives.all_to_all(input_, _axis(group), split_sizes=send, concat_sizes=receive)


def all_to_all_sp2hp(input_: Tensor, group: AxisLike = None) -> Tensor:
    """From rows cut over the ranks to columns cut; backward is `all_to_all_hp2sp`.

    ::

        V -> V    shape (n/W, H) -> (n, H/W)    [a0 a1] -> [a0]      [g0[0] g1[0]] <- [g0[0]]
                                                           [b0]                       [g0[1]]
                                                [b0 b1] -> [a1]      [g0[1] g1[1]] <- [g1[0]]
                                                           [b1]                       [g1[1]]


    Args:
        input_: this rank's rows; leading dimensions are flattened into them.
        group: the ranks of the tensor parallel group.

    Raises:
        ShapeError: the ranks do not divide that dimension.

    Example:
        >>> def on_each_rank():
        ...     return all_to_all_sp2hp(torch.arange(2).view(1, 2) + 10 * gm.axis().rank).tolist()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [[[0], [10]], [[1], [11]]]
    """
    rows = input_.reshape(-1, input_.shape[-1])
    return collectives.all_to_all(rows, _axis(group), split_dim=1, concat_dim=0)


def all_to_all_hp2sp(input_: Tensor, group: AxisLike = None) -> Tensor:
    """From columns cut over the ranks to rows cut; backward is `all_to_all_sp2hp`.

    ::

        V -> V    shape (n, H/W) -> (n/W, H)    [a0] -> [a0 b0]      [g0[0]] <- [g0[0] g0[1]]
                                                [a1]                 [g1[0]]
                                                [b0] -> [a1 b1]      [g0[1]] <- [g1[0] g1[1]]
                                                [b1]                 [g1[1]]


    Args:
        input_: this rank's columns; leading dimensions are flattened into the rows.
        group: the ranks of the tensor parallel group.

    Raises:
        ShapeError: the ranks do not divide the number of rows.

    Example:
        >>> def on_each_rank():
        ...     return all_to_all_hp2sp(torch.arange(2).view(2, 1) + 10 * gm.axis().rank).tolist()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [[[0, 10]], [[1, 11]]]
    """
    rows = input_.reshape(-1, input_.shape[-1])
    return collectives.all_to_all(rows, _axis(group), split_dim=0, concat_dim=1)


def _axis(group: AxisLike) -> Axis:
    mesh = current_mesh()
    if group is None and mesh is not None and "tp" in (mesh.mesh_dim_names or ()):
        group = "tp"
    return resolve(group, "compat.megatron")


def _ints(sizes: Sizes) -> list[int] | None:
    return None if sizes is None else [int(size) for size in sizes]
