"""Tensors cut and padded for the ranks of a graph; no communication."""

from __future__ import annotations

import torch
from torch import Tensor

from gradmesh.compat.gp_utils.groups import get_gp_world_size
from gradmesh.errors import ShapeError, message

__all__ = ["pad_tensor", "part_sizes", "trim_tensor"]


def pad_tensor(tensor: Tensor, dim: int = -1, target_size: int | None = None) -> Tensor:
    """Append zeros along `dim`.

    Args:
        tensor: any tensor; returned as it is when it needs no padding.
        dim: the dimension to make longer.
        target_size: the size to reach; None: the next multiple of the gp world size.

    Raises:
        ShapeError: the tensor is longer than `target_size`.

    Example:
        >>> pad_tensor(torch.ones(2), target_size=3)
        tensor([1., 1., 0.])
    """
    size = tensor.size(dim)
    missing = -size % get_gp_world_size() if target_size is None else target_size - size
    if missing < 0:
        raise ShapeError(
            message(
                "the tensor is longer than the size to pad to",
                op="compat.gp_utils.pad_tensor",
                expected=f"at most {target_size} along dim {dim}",
                got=f"shape {tuple(tensor.shape)}",
                remedy="pass a target_size that no rank's tensor exceeds",
            )
        )
    if missing == 0:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = missing
    return torch.cat([tensor, tensor.new_zeros(shape)], dim)


def trim_tensor(tensor: Tensor, sizes: Tensor | None = None, dim: int = 0) -> tuple[Tensor, Tensor | None]:
    """Cut off the end along `dim`, so that the gp world size divides what is left.

    Args:
        tensor: any tensor; returned as it is when it needs no cutting.
        sizes: the sizes of the pieces that lie along `dim`, such as atoms per molecule.
        dim: the dimension to cut.

    Returns:
        The tensor, and new sizes from whose end as much is taken; the given ones are only read.

    Example:
        >>> trim_tensor(torch.ones(3), torch.tensor([1, 2]))
        (tensor([1., 1., 1.]), tensor([1, 2]))
    """
    size = tensor.size(dim)
    excess = size % get_gp_world_size()
    if excess == 0:
        return tensor, sizes
    if sizes is not None:
        # A last piece smaller than the excess goes whole, and the one before it gives the rest.
        left = (sizes.flip(0).cumsum(0) - excess).clamp(min=0)
        sizes = left.diff(prepend=left.new_zeros(1)).flip(0).to(sizes.dtype)
    return tensor.narrow(dim, 0, size - excess), sizes


def _split_tensor(
    tensor: Tensor, num_parts: int, dim: int = -1, contiguous_chunks: bool = False
) -> tuple[Tensor, ...]:
    """Cut along `dim` into exactly `num_parts` views of ceil(n / num_parts), the last ones smaller or empty.

    >>> [part.tolist() for part in _split_tensor(torch.arange(5), 4)]
    [[0, 1], [2, 3], [4], []]
    """
    parts = tensor.split(part_sizes(tensor.size(dim), num_parts), dim)
    return tuple(part.contiguous() for part in parts) if contiguous_chunks else tuple(parts)


def part_sizes(size: int, num_parts: int) -> list[int]:
    """The sizes of the parts of `_split_tensor`.

    >>> part_sizes(5, 4)
    [2, 2, 1, 0]
    """
    part = -(-size // num_parts)
    return [max(0, min(part, size - rank * part)) for rank in range(num_parts)]
