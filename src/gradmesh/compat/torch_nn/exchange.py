"""all_gather and all_to_all."""

# The signatures are torch's own, where a tensor is called `input`.
# ruff: noqa: A002

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradmesh.compat.ksuit import separate
from gradmesh.compat.torch_nn.arguments import axis_of, equal, fill, one_each
from gradmesh.runtime.mesh import AxisLike
from gradmesh.verbs import collectives

__all__ = ["all_gather", "all_to_all", "all_to_all_single"]


def all_gather(tensor: Tensor, group: AxisLike = None) -> tuple[Tensor, ...]:
    """All ranks' tensors, on every rank.

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
    """All ranks' tensors concatenated, on every rank.

    ::

        V -> R    shape (n, ...) -> (W n, ...)    x0 -> [x0 x1]      g0[0]+g1[0] <- [g0[0] g0[1]]
                                                  x1 -> [x0 x1]      g0[1]+g1[1] <- [g1[0] g1[1]]

    Args:
        output_tensor: filled with the result, which has its shape; any shape with W times the elements.
        input_tensor: this rank's tensor, of one shape on all ranks.
        group: the ranks to gather from.

    Raises:
        ShapeError: `output_tensor` has another number of elements.

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
    """Send `input_tensor_list[r]` to rank r of the group.

    ::

        V -> V    W of any shapes -> W of any shapes    (a0, a1) -> (a0, b0)      (g0[0], g1[0]) <- (g0[0], g0[1])
                                                        (b0, b1) -> (a1, b1)      (g0[1], g1[1]) <- (g1[0], g1[1])

    Args:
        output_tensor_list: filled with the results.
        input_tensor_list: one tensor for each rank.
        group: the ranks to exchange among.

    Returns:
        The tensors received from each rank, in the shapes of `output_tensor_list`, which may all differ.

    Raises:
        ShapeError: a list does not have one tensor for each rank, or an output has another number of elements.

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
    """Send the r-th part of `input` along dim 0 to rank r of the group.

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
        ShapeError: the sizes do not add up, or `output` has another number of elements.

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
