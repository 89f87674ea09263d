"""Words of a vocabulary that is cut over ranks."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from gradmesh._torch import is_fake, transforms_active
from gradmesh.wire import compiling

__all__ = ["out_of_range", "place"]


def place(words: Tensor, sizes: Sequence[int], rank: int) -> tuple[Tensor, Tensor]:
    """Each word's place in this rank's part, 0 where it has none there, and whether it is this rank's."""
    places = words - sum(sizes[:rank])
    own = (places >= 0) & (places < sizes[rank])
    return places.where(own, 0), own


def out_of_range(words: Tensor, total: int, ignored: int | None = None) -> bool:
    """Whether there is a word that the vocabulary lacks; not asked where the answer would have to be waited for."""
    if (
        not words.numel()
        or words.device.type != "cpu"
        or compiling()
        or is_fake(words)
        or transforms_active()
    ):
        return False
    wrong = (words < 0) | (words >= total)
    if ignored is not None:
        wrong &= words != ignored
    return bool(wrong.any())
