"""Which rows see which keys: whole rectangles, and squares below their diagonal, so that no mask is needed.

A rank has some pieces of the sequence, in rising order. Between two ranks a piece of documents lies before another one,
or behind it, or belongs to another document: its rows see all keys of the other, or none.
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
    """Places of the sequence that follow one another: from `start` up to `stop`."""

    start: int
    stop: int


class Tile(NamedTuple):
    """A rectangle of scores that are to be taken.

    Attributes:
        batch: which of the batch it is of, from one up to another; None: of all.
        rows: which of the rank's rows, from one up to another.
        keys: which of the keys that are there.
        diagonal: whether each row sees the keys up to its own alone; rows and keys are the same ones then.
    """

    batch: tuple[int, int] | None
    rows: tuple[int, int]
    keys: tuple[int, int]
    diagonal: bool = False


@dataclass(frozen=True)
class Layout:
    """What the tiles depend on.

    Attributes:
        rows: each rank's pieces of the sequence.
        keys: each rank's keys; other ones than its rows in cross attention, where every row sees every key.
        causal: whether a row sees only keys up to its own place.
        lengths: of the documents in the sequence, one list for each sequence of the batch, or one for all.
        fold: into how many a sequence of the batch was cut, by groups of heads.
    """

    rows: tuple[tuple[Piece, ...], ...]
    keys: tuple[tuple[Piece, ...], ...]
    causal: bool
    lengths: tuple[tuple[int, ...], ...] | None
    fold: int = 1


class _Part(NamedTuple):
    """What a rank has of one document: places, and where it has them."""

    document: int
    start: int
    stop: int
    first: int

    @property
    def local(self) -> tuple[int, int]:
        return self.first, self.first + self.stop - self.start


def tiles(layout: Layout, rank: int, source: int) -> tuple[Tile, ...]:
    """The rectangles of this rank's rows with the keys of another one.

    >>> halves = (Piece(0, 2), Piece(6, 8)), (Piece(2, 4), Piece(4, 6))
    >>> tiles(Layout(halves, halves, True, None), 0, 1)  # the second half sees everything
    (Tile(batch=None, rows=(2, 4), keys=(0, 4), diagonal=False),)
    """
    return (_tiles if compiling() else _known)(layout, rank, source)


def _tiles(layout: Layout, rank: int, source: int) -> tuple[Tile, ...]:
    mine, theirs = layout.rows[rank], layout.keys[source]
    if not layout.causal and layout.lengths is None:
        rows, keys = (sum(stop - start for start, stop in held) for held in (mine, theirs))
        return (Tile(None, (0, rows), (0, keys)),) if rows and keys else ()
    found: list[Tile] = []
    for batch, lengths in enumerate(layout.lengths or (None,)):
        apart = layout.lengths is not None and len(layout.lengths) > 1
        of = (batch * layout.fold, (batch + 1) * layout.fold) if apart else None
        if layout.causal and rank == source:
            spans = _by_document(_parts(mine, lengths))
            found += (Tile(of, span, span, diagonal=True) for span in spans)
        else:
            found += _rectangles(of, _parts(mine, lengths), _parts(theirs, lengths), causal=layout.causal)
    return tuple(found)


_known = lru_cache(maxsize=256)(_tiles)


def _parts(pieces: Sequence[Piece], lengths: Sequence[int] | None) -> list[_Part]:
    """The pieces, cut where documents end. What lies behind the last document is padding, and left out."""
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
    """Where a rank has each document."""
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
    """The tiles as a mask, (batch or 1, 1, rows, keys): True where a score is to be taken.

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
