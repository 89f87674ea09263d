"""Words of a vocabulary that is cut over ranks."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from gradmesh._torch import transforms_active
from gradmesh.axis import Axis
from gradmesh.checking import FULL, check_level
from gradmesh.collectives import replicate
from gradmesh.nn.plain import known
from gradmesh.transport import compiling

__all__ = ["out_of_range", "place", "same_on_all_ranks"]


def place(words: Tensor, sizes: Sequence[int], rank: int) -> tuple[Tensor, Tensor]:
    """Each word's place in this rank's part, 0 where it has none there, and whether it is this rank's."""
    places = words - sum(sizes[:rank])
    own = (places >= 0) & (places < sizes[rank])
    return places.where(own, 0), own


def same_on_all_ranks(words: Tensor, axis: Axis) -> None:
    """Under `check("full")`, refuse words that differ from rank to rank."""
    if check_level() == FULL and not compiling() and not transforms_active():
        replicate(words, axis)


def out_of_range(words: Tensor, total: int, ignored: int | None = None) -> bool:
    """Whether there is a word that the vocabulary lacks; not asked where the answer would have to be waited for."""
    if not words.numel() or not known(words):
        return False
    wrong = (words < 0) | (words >= total)
    if ignored is not None:
        wrong &= words != ignored
    return bool(wrong.any())
