"""Which rank owns which atom, under fairchem's names: `by_count` and `by_space` of `gradmesh.nn.graph`."""

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
    """Cut the atoms by their number; the first ranks get one more where that does not divide.

    Args:
        total_atoms: the number of atoms.
        num_ranks: the number of ranks.
        device: where the result is to be.

    Raises:
        ArgumentError: numbers that are none.

    Example:
        >>> partition_atoms_index_split(5, 2, torch.device("cpu"))
        tensor([0, 0, 0, 1, 1])
    """
    return by_count(total_atoms, num_ranks).to(device or "cpu")


def partition_atoms_spatial(
    pos: Tensor,
    num_ranks: int,
    num_iters: int = 10,  # noqa: ARG001 - not read by the original either
) -> Tensor:
    """Give each rank the atoms of a region; the first ranks get one more where their number does not divide.

    The regions are those of `by_space`, not those of the original: any assignment is right, and this one cuts fewer
    edges.

    Args:
        pos: where the atoms are, shape (atoms, 3); no gradient flows.
        num_ranks: the number of ranks.
        num_iters: not read.

    Raises:
        ArgumentError: positions that are no matrix of finite numbers.

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
        pos: where the atoms are, shape (atoms, 3).
        total_atoms: the number of atoms.
        device: where the result is to be.
        world_size: the number of ranks.
        rank: the rank whose atoms are returned.
        strategy: by place, `PartitionStrategy.SPATIAL`, or by number.

    Raises:
        ArgumentError: positions, numbers that are none.

    Example:
        >>> compute_a2a_partition(torch.rand(3, 3), 3, "cpu", 2, 1, PartitionStrategy.INDEX_SPLIT)
        (tensor([0, 0, 1]), tensor([2]))
    """
    if GPPartition(strategy) is GPPartition.SPATIAL:
        assignments = partition_atoms_spatial(pos, world_size).to(device)
    else:
        assignments = partition_atoms_index_split(total_atoms, world_size, device)
    return assignments, (assignments == rank).nonzero().squeeze(1)
