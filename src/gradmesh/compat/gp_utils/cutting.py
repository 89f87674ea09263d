"""Splitting and padding of tensors, without communication."""

from __future__ import annotations

import torch
from torch import Tensor

from gradmesh.compat.gp_utils.groups import get_gp_world_size
from gradmesh.errors import ShapeError, message

__all__ = ["pad_tensor", "part_sizes", "trim_tensor"]


def pad_tensor(tensor: Tensor, dim: int = -1, target_size: int | None = None) -> Tensor:
    """Append zeros along `dim`.

    Args:
        tensor: any tensor; returned unchanged if it needs no padding.
        dim: the dimension to pad.
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
                "the tensor is longer than target_size",
                op="compat.gp_utils.pad_tensor",
                expected=f"size at most {target_size} along dim {dim}",
                got=f"shape {tuple(tensor.shape)}",
                remedy=f"pass the maximum of all ranks' sizes, at least target_size={size}",
            )
        )
    if missing == 0:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = missing
    return torch.cat([tensor, tensor.new_zeros(shape)], dim)


def trim_tensor(tensor: Tensor, sizes: Tensor | None = None, dim: int = 0) -> tuple[Tensor, Tensor | None]:
    """Trim the end along `dim`, so that the size is divisible by the gp world size.

    Args:
        tensor: any tensor; returned unchanged if it needs no trimming.
        sizes: the sizes of consecutive pieces along `dim`, such as atoms per molecule.
        dim: the dimension to trim.

    Returns:
        The tensor, and a copy of the sizes, reduced accordingly from the end.

    Example:
        >>> trim_tensor(torch.ones(3), torch.tensor([1, 2]))
        (tensor([1., 1., 1.]), tensor([1, 2]))
    """
    size = tensor.size(dim)
    excess = size % get_gp_world_size()
    if excess == 0:
        return tensor, sizes
    if sizes is not None:
        # If the last piece is smaller than the excess, it becomes 0 and the piece before it is reduced by the rest.
        left = (sizes.flip(0).cumsum(0) - excess).clamp(min=0)
        sizes = left.diff(prepend=left.new_zeros(1)).flip(0).to(sizes.dtype)
    return tensor.narrow(dim, 0, size - excess), sizes


def _split_tensor(
    tensor: Tensor, num_parts: int, dim: int = -1, contiguous_chunks: bool = False
) -> tuple[Tensor, ...]:
    """Split along `dim` into exactly `num_parts` views of ceil(n / num_parts), the last ones smaller or empty.

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
