"""Join the records that each rank returns from a block."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar

from gradmesh.errors import ArgumentError, message

__all__ = ["complete"]


class _Record(Protocol):
    @property
    def begun(self) -> float: ...  # wording: ok


RecordT = TypeVar("RecordT", bound=_Record)


def complete(ranks: Iterable[RecordT], whole: str, block: str) -> list[RecordT]:
    """Return the ranks' records as a list.

    Args:
        ranks: one record per rank.
        whole: the name of their class, for the error.
        block: the call that creates a record, for the error.

    Raises:
        ArgumentError: there are no records, or a record's block has not ended yet.
    """
    parts = list(ranks)
    if not parts or not all(part.begun for part in parts):
        raise ArgumentError(
            message(
                "no complete records to join",
                op=f"{whole}.joined",
                expected=f"the object of `with {block} as record:` from each rank, after the block has ended",
                got=f"{len(parts)} records, {sum(not part.begun for part in parts)} of them with an open block",
                remedy="return `record` from the function that each rank runs, after the with block",
            )
        )
    return parts
