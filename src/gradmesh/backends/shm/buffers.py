"""The layout of a group's shared memory: words, ring buffers, and chunks (bounce buffers).

In this order: a token; the words that ranks publish; a ring buffer for each pair of ranks; two chunks for each rank.
The size depends only on the number of ranks and the chunk size, since messages are split into chunks. Untouched pages
take no memory.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from gradmesh.environment import SHM_CHUNK

__all__ = ["TOKEN", "Buffers", "Slots", "chunk_bytes", "segment_bytes"]

_PAGE = 4096
TOKEN = 16
"""The size of the token at the start, which identifies the file."""
_WORD = 8


def chunk_bytes() -> int:
    """The chunk size in bytes: GRADMESH_SHM_CHUNK in the environment, else 1 MiB."""
    return SHM_CHUNK.read()


def _word_count(size: int) -> int:
    # published, mapped, state, returned, blamed; two hashes; two tables of counts; written and read for every pair.
    return 5 * size + 2 * size + 4 * size * size + 2 * size * size


def segment_bytes(size: int, chunk: int) -> int:
    """The size of a group's segment: two chunks for each rank, and a ring of the same size for each pair of ranks.

    Args:
        size: the number of ranks.
        chunk: the bytes of a chunk.

    >>> segment_bytes(2, 1 << 20) // (1 << 20)
    8
    """
    words = TOKEN + _WORD * _word_count(size)
    return -(-words // _PAGE) * _PAGE + (size + 2) * size * chunk


class Slots:
    """Views of one chunk of every rank: as one tensor (rank, element), and one per rank."""

    __slots__ = ("_pieces", "rows", "together")

    def __init__(self, together: torch.Tensor, rows: list[torch.Tensor]) -> None:
        self.together = together
        self.rows = rows
        self._pieces: list[list[torch.Tensor]] | None = None

    def pieces(self, parts: int) -> list[list[torch.Tensor]]:
        """Each rank's chunk in equal parts; `parts` must be the same at every call."""
        if self._pieces is None:
            with torch.inference_mode(False):
                each = self.together.shape[1] // parts
                self._pieces = [list(row.view(parts, each).unbind(0)) for row in self.rows]
        return self._pieces


class Buffers:
    """The shared memory of a group.

    Each word is written by one rank only. Words are 8 bytes and aligned, so that loads and stores are atomic.

    Args:
        memory: the mapped memory.
        rank: this rank.
        size: the number of ranks.
        chunk: the bytes of a chunk.

    Attributes:
        published: for each rank, the number of epochs that it has published.
        states: for each rank, whether it is open, has left, or has aborted.
        returned: for each rank, the number of the launcher's run from which its function has returned.
        blamed: for each rank that aborted, 1 + the rank that caused it, or 0.
        hashes: two buffers with one word per rank: the hash of its call.
        counts: two buffers with two rows per rank: the counts that it sends to and receives from each rank.
        written: for each pair (source, target), the bytes written to its ring.
        read: for each pair, the bytes read from it.
        rings: for each pair, its ring as a tensor of bytes.
        raw_rings: the same as memoryviews.
    """

    def __init__(self, memory: Any, rank: int, size: int, chunk: int) -> None:
        self.rank, self.size, self.chunk = rank, size, chunk
        ring = chunk
        raw = memoryview(memory).cast("B")
        words = raw[TOKEN : TOKEN + _WORD * _word_count(size)].cast("Q")
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + TOKEN
        at = 0

        def take(count: int) -> memoryview:
            nonlocal at
            at += count
            return words[at - count : at]

        self.published = take(size)
        self.mapped = take(size)
        self.states = take(size)
        self.returned = take(size)
        self.blamed = take(size)
        self.hashes = [take(size) for _ in range(2)]
        self.counts = [take(2 * size * size) for _ in range(2)]
        self._written_at = self._base + _WORD * at
        self.written = take(size * size)
        self._read_at = self._base + _WORD * at
        self.read = take(size * size)
        with torch.device("cpu"), torch.inference_mode(False):
            data = torch.frombuffer(memory, dtype=torch.uint8)
        first_slot = len(data) - 2 * size * chunk
        first_ring = first_slot - size * size * ring
        self.ring_bytes = ring
        with torch.inference_mode(False):
            self.rings = list(data[first_ring:first_slot].view(size * size, ring).unbind(0))
            self._slots = data[first_slot:]
        self.raw_rings = [
            raw[first_ring + pair * ring : first_ring + (pair + 1) * ring] for pair in range(size * size)
        ]
        self._raw_slots = raw[first_slot:]
        self._views: dict[tuple[torch.dtype, int], tuple[Slots, Slots]] = {}
        self.mapped[self.rank] = 1

    def slots(self, dtype: torch.dtype, count: int) -> tuple[Slots, Slots]:
        """The first `count` elements of every rank's two chunks, as tensors of that dtype."""
        found = self._views.get((dtype, count))
        if found is None:
            if len(self._views) >= 512:
                self._views.clear()
            # A view created in inference mode could not be written outside of it.
            with torch.inference_mode(False):
                found = self._view(dtype, count, 0), self._view(dtype, count, 1)
            self._views[dtype, count] = found
        return found

    def raw_slot(self, rank: int, buffer: int) -> memoryview:
        """A rank's chunk as bytes."""
        start = (2 * rank + buffer) * self.chunk
        return self._raw_slots[start : start + self.chunk]

    def _view(self, dtype: torch.dtype, count: int, buffer: int) -> Slots:
        whole = self._slots.view(dtype)
        width = self.chunk // dtype.itemsize
        together = whole.as_strided(
            (self.size, count), (2 * width, 1), whole.storage_offset() + buffer * width
        )
        return Slots(together, list(together.unbind(0)))

    def word(self, rank: int) -> int:
        """The address of a rank's `published` word."""
        return self._base + _WORD * rank

    def written_word(self, pair: int) -> int:
        """The address of a ring's `written` word."""
        return self._written_at + _WORD * pair

    def read_word(self, pair: int) -> int:
        """The address of a ring's `read` word."""
        return self._read_at + _WORD * pair
