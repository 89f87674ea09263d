"""Ids of a sharded vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from gradmesh._torch import transforms_active
from gradmesh.nn.plain import readable
from gradmesh.runtime.checking import FULL, check_level
from gradmesh.runtime.mesh import Axis
from gradmesh.transport import compiling
from gradmesh.verbs.collectives import replicate

__all__ = ["check_replicated", "local_ids", "out_of_range"]


def local_ids(ids: Tensor, sizes: Sequence[int], rank: int) -> tuple[Tensor, Tensor]:
    """The ids as local indices (0 if another rank's), and a mask of those in this rank's shard."""
    local = ids - sum(sizes[:rank])
    mask = (local >= 0) & (local < sizes[rank])
    return local.where(mask, 0), mask


def check_replicated(ids: Tensor, axis: Axis) -> None:
    """Under `check("full")`, raise if the ids differ between ranks."""
    if check_level() == FULL and not compiling() and not transforms_active():
        replicate(ids, axis)


def out_of_range(ids: Tensor, total: int, ignored: int | None = None) -> bool:
    """True if an id is not in the vocabulary; False if the values cannot be read without synchronizing."""
    if not ids.numel() or not readable(ids):
        return False
    wrong = (ids < 0) | (ids >= total)
    if ignored is not None:
        wrong &= ids != ignored
    return bool(wrong.any())
