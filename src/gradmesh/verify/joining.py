"""What ranks return from a block each, put together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar

from gradmesh.errors import ArgumentError, message

__all__ = ["complete"]


class _Begun(Protocol):
    @property
    def begun(self) -> float: ...


PartT = TypeVar("PartT", bound=_Begun)


def complete(ranks: Iterable[PartT], whole: str, block: str) -> list[PartT]:
    """The ranks' parts, all of them complete.

    Args:
        ranks: the part of each.
        whole: the class that they are of.
        block: how a rank gets one.

    Raises:
        ArgumentError: there is none, or one that is not complete, as its block has not ended.
    """
    parts = list(ranks)
    if not parts or not all(part.begun for part in parts):
        raise ArgumentError(
            message(
                "there is nothing to join",
                op=f"{whole}.joined",
                expected=f"what `{block}` gave on each rank, after the block",
                got=f"{len(parts)} parts, {sum(not part.begun for part in parts)} of them without an end",
                remedy="return it from the function that each rank runs",
            )
        )
    return parts
