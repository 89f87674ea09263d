"""The tiles of scores to compute: unmasked rectangles, and diagonal squares with a causal mask.

A rank holds some pieces of the sequence, in rising order. The rows of a piece attend to all keys of another rank's
piece or to none: it precedes them in the same document, or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from gradmesh.transport import compiling

__all__ = ["Layout", "Piece", "Tile", "mask", "tiles"]


class Piece(NamedTuple):
    """Consecutive positions of the sequence, `start <= position < stop`."""

    start: int
    stop: int


class Tile(NamedTuple):
    """A rectangle of scores to compute. Intervals are half-open.

    Attributes:
        batch: interval of the batch; None: all.
        rows: interval of the local rows.
        keys: interval of the block's keys.
        diagonal: True for a causal mask within the tile; rows and keys are then the same positions.
    """

    batch: tuple[int, int] | None
    rows: tuple[int, int]
    keys: tuple[int, int]
    diagonal: bool = False


@dataclass(frozen=True)
class Layout:
    """The distribution of a sequence over the ranks, and its mask.

    Attributes:
        rows: each rank's pieces of the queries.
        keys: each rank's pieces of the keys; differs from `rows` in cross attention, which has no mask.
        causal: True if a position attends only to positions up to itself.
        lengths: of the documents in the sequence, one tuple for each sequence of the batch, or one for all.
        fold: number of groups of heads that are folded into the batch.
    """

    rows: tuple[tuple[Piece, ...], ...]
    keys: tuple[tuple[Piece, ...], ...]
    causal: bool
    lengths: tuple[tuple[int, ...], ...] | None
    fold: int = 1


class _Part(NamedTuple):
    """The positions of one document on a rank, and the local index of the first."""

    document: int
    start: int
    stop: int
    first: int

    @property
    def local(self) -> tuple[int, int]:
        return self.first, self.first + self.stop - self.start


def tiles(layout: Layout, rank: int, source: int) -> tuple[Tile, ...]:
    """The tiles of this rank's rows with the keys of rank `source`.

    >>> halves = (Piece(0, 2), Piece(6, 8)), (Piece(2, 4), Piece(4, 6))
    >>> tiles(Layout(halves, halves, True, None), 0, 1)  # the second half attends to all keys
    (Tile(batch=None, rows=(2, 4), keys=(0, 4), diagonal=False),)
    """
    return (_tiles if compiling() else _cached_tiles)(layout, rank, source)


def _tiles(layout: Layout, rank: int, source: int) -> tuple[Tile, ...]:
    mine, theirs = layout.rows[rank], layout.keys[source]
    if not layout.causal and layout.lengths is None:
        rows, keys = (sum(stop - start for start, stop in held) for held in (mine, theirs))
        return (Tile(None, (0, rows), (0, keys)),) if rows and keys else ()
    found: list[Tile] = []
    for batch, lengths in enumerate(layout.lengths or (None,)):
        separate = layout.lengths is not None and len(layout.lengths) > 1
        of = (batch * layout.fold, (batch + 1) * layout.fold) if separate else None
        if layout.causal and rank == source:
            spans = _by_document(_parts(mine, lengths))
            found += (Tile(of, span, span, diagonal=True) for span in spans)
        else:
            found += _rectangles(of, _parts(mine, lengths), _parts(theirs, lengths), causal=layout.causal)
    return tuple(found)


_cached_tiles = lru_cache(maxsize=256)(_tiles)


def _parts(pieces: Sequence[Piece], lengths: Sequence[int] | None) -> list[_Part]:
    """The pieces, split at document boundaries, without the padding after the last document."""
    ends = [0, *accumulate((pieces[-1].stop,) if lengths is None else lengths)]
    found: list[_Part] = []
    first = 0
    for start, stop in pieces:
        for document, (begin, end) in enumerate(pairwise(ends)):
            low, high = max(start, begin), min(stop, end)
            if low < high:
                found.append(_Part(document, low, high, first + low - start))
        first += stop - start
    return found


def _by_document(parts: Sequence[_Part]) -> list[tuple[int, int]]:
    """The local interval of each document."""
    spans: dict[int, tuple[int, int]] = {}
    for part in parts:
        first = spans.get(part.document, part.local)[0]
        spans[part.document] = first, part.local[1]
    return list(spans.values())


def _rectangles(
    batch: tuple[int, int] | None, mine: Sequence[_Part], theirs: Sequence[_Part], *, causal: bool
) -> list[Tile]:
    found: list[Tile] = []
    for part in mine:
        seen = [
            other.local
            for other in theirs
            if other.document == part.document and (not causal or other.stop <= part.start)
        ]
        if not seen:
            continue
        keys, rows = (seen[0][0], seen[-1][1]), part.local
        if found and found[-1].keys == keys and found[-1].rows[1] == rows[0]:
            rows = found.pop().rows[0], rows[1]
        found.append(Tile(batch, rows, keys))
    return found


def mask(of: Sequence[Tile], batch: int, rows: int, keys: int, device: torch.device) -> Tensor:
    """The tiles as a mask, (batch or 1, 1, rows, keys): True where a score is used.

    >>> mask([Tile(None, (0, 2), (0, 2), True)], 1, 2, 2, torch.device("cpu")).int().tolist()
    [[[[1, 0], [1, 1]]]]
    """
    several = any(tile.batch is not None for tile in of)
    made = torch.zeros(batch if several else 1, 1, rows, keys, dtype=torch.bool, device=device)
    for tile in of:
        (row, row_end), (key, key_end) = tile.rows, tile.keys
        block = torch.ones((row_end - row, key_end - key), dtype=torch.bool, device=device)
        where = slice(None) if tile.batch is None else slice(*tile.batch)
        made[where, :, row:row_end, key:key_end] = block.tril() if tile.diagonal else block
    return made
