"""The all-to-alls."""

from __future__ import annotations

from torch import Tensor

from gradmesh.compat.megatron.arguments import Group, Sizes, axis_of, ints
from gradmesh.verbs import collectives

__all__ = ["all_to_all", "all_to_all_hp2sp", "all_to_all_sp2hp"]


def all_to_all(
    group: Group,
    input_: Tensor,
    output_split_sizes_: Sizes = None,
    input_split_sizes: Sizes = None,
) -> Tensor:
    """Send the r-th part of the first dimension to rank r.

    ::

        V -> V    shape (n, ...) -> (m, ...)    [a0 a1] -> [a0 b0]      [g0[0] g1[0]] <- [g0[0] g0[1]]
                                                [b0 b1] -> [a1 b1]      [g0[1] g1[1]] <- [g1[0] g1[1]]

    Args:
        group: the ranks to exchange among.
        input_: the parts for all ranks.
        output_split_sizes_: the size of the part from each rank; None: equal parts. (The original has the underscore.)
        input_split_sizes: the size of the part for each rank; None: equal parts.

    Raises:
        ShapeError: the sizes do not add up; or None, and the first dimension is not divisible by the number of ranks.

    Example:
        >>> def on_each_rank():
        ...     return all_to_all(None, 10 * gm.axis().rank + torch.arange(2)).tolist()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [[0, 10], [1, 11]]
    """
    send, receive = ints(input_split_sizes), ints(output_split_sizes_)
    return collectives.all_to_all(input_, axis_of(group), split_sizes=send, concat_sizes=receive)


def all_to_all_hp2sp(input_: Tensor, group: Group = None) -> Tensor:
    """From sharded columns to sharded rows; backward is `all_to_all_sp2hp`.

    ::

        V -> V    shape (n, H/W) -> (n/W, H)    [a0] -> [a0 b0]      [g0[0]] <- [g0[0] g0[1]]
                                                [a1]                 [g1[0]]
                                                [b0] -> [a1 b1]      [g0[1]] <- [g1[0] g1[1]]
                                                [b1]                 [g1[1]]

    Args:
        input_: this rank's columns; leading dimensions are flattened into the rows.
        group: the ranks of the tensor parallel group.

    Raises:
        ShapeError: the number of rows is not divisible by the number of ranks.

    Example:
        >>> def on_each_rank():
        ...     return all_to_all_hp2sp(torch.arange(2).view(2, 1) + 10 * gm.axis().rank).tolist()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [[[0, 10]], [[1, 11]]]
    """
    rows = input_.reshape(-1, input_.shape[-1])
    return collectives.all_to_all(rows, axis_of(group), split_dim=0, concat_dim=1)


def all_to_all_sp2hp(input_: Tensor, group: Group = None) -> Tensor:
    """From sharded rows to sharded columns; backward is `all_to_all_hp2sp`.

    ::

        V -> V    shape (n/W, H) -> (n, H/W)    [a0 a1] -> [a0]      [g0[0] g1[0]] <- [g0[0]]
                                                           [b0]                       [g0[1]]
                                                [b0 b1] -> [a1]      [g0[1] g1[1]] <- [g1[0]]
                                                           [b1]                       [g1[1]]

    Args:
        input_: this rank's rows; leading dimensions are flattened into them.
        group: the ranks of the tensor parallel group.

    Raises:
        ShapeError: the number of columns is not divisible by the number of ranks.

    Example:
        >>> def on_each_rank():
        ...     return all_to_all_sp2hp(torch.arange(2).view(1, 2) + 10 * gm.axis().rank).tolist()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [[[0], [10]], [[1], [11]]]
    """
    rows = input_.reshape(-1, input_.shape[-1])
    return collectives.all_to_all(rows, axis_of(group), split_dim=1, concat_dim=0)
