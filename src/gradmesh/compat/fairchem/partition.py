"""Partitions of atoms: `by_count` and `by_space` of `gradmesh.nn.graph` under fairchem's names."""

from __future__ import annotations

import torch
from torch import Tensor

from gradmesh.compat.fairchem.config import GPPartition
from gradmesh.nn.graph import by_count, by_space

__all__ = [
    "PartitionStrategy",
    "compute_a2a_partition",
    "partition_atoms_index_split",
    "partition_atoms_spatial",
]

PartitionStrategy = GPPartition


def partition_atoms_index_split(
    total_atoms: int, num_ranks: int, device: torch.device | str | None = None
) -> Tensor:
    """Partition atoms by index into equal parts; the first ranks get one more if the division has a remainder.

    Args:
        total_atoms: the number of atoms.
        num_ranks: the number of ranks.
        device: of the result.

    Raises:
        ArgumentError: invalid numbers.

    Example:
        >>> partition_atoms_index_split(5, 2, torch.device("cpu"))
        tensor([0, 0, 0, 1, 1])
    """
    return by_count(total_atoms, num_ranks).to(device or "cpu")


def partition_atoms_spatial(
    pos: Tensor,
    num_ranks: int,
    num_iters: int = 10,  # noqa: ARG001 - ignored by the original too
) -> Tensor:
    """Partition atoms by region; the first ranks get one more if the division has a remainder.

    The regions are those of `by_space`, not those of the original: any partition is valid, and this one has fewer edges
    between ranks.

    Args:
        pos: positions, shape (atoms, 3); no gradient flows.
        num_ranks: the number of ranks.
        num_iters: ignored.

    Raises:
        ArgumentError: `pos` is not a matrix of finite numbers.

    Example:
        >>> corners = torch.tensor([[0.0, 0.0, 0.0], [9.0, 0.0, 0.0], [0.0, 1.0, 0.0], [9.0, 1.0, 0.0]])
        >>> partition_atoms_spatial(corners, 2)
        tensor([0, 1, 0, 1])
    """
    return by_space(pos, num_ranks)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def compute_a2a_partition(
    pos: Tensor,
    total_atoms: int,
    device: torch.device | str,
    world_size: int,
    rank: int,
    strategy: GPPartition,
) -> tuple[Tensor, Tensor]:
    """The rank that owns each atom, and the atoms that one rank owns.

    Args:
        pos: positions, shape (atoms, 3).
        total_atoms: the number of atoms.
        device: of the result.
        world_size: the number of ranks.
        rank: the rank whose atoms are returned.
        strategy: by position, `PartitionStrategy.SPATIAL`, or by index.

    Raises:
        ArgumentError: invalid positions or numbers.

    Example:
        >>> compute_a2a_partition(torch.rand(3, 3), 3, "cpu", 2, 1, PartitionStrategy.INDEX_SPLIT)
        (tensor([0, 0, 1]), tensor([2]))
    """
    if GPPartition(strategy) is GPPartition.SPATIAL:
        assignments = partition_atoms_spatial(pos, world_size).to(device)
    else:
        assignments = partition_atoms_index_split(total_atoms, world_size, device)
    return assignments, (assignments == rank).nonzero().squeeze(1)
