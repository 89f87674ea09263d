"""Point-to-point messages: a ring buffer in shared memory for each pair of ranks, and the queues at both ends.

A message is a header and the tensor's bytes. What fits in the ring is buffered; the rest follows as the receiver reads.
A message is read from the ring when a receive matches it, or when it precedes one that is matched: then it is stored
separately.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from gradmesh.backends.own_group import DTYPE_NUMBER, DTYPES, mismatched_message
from gradmesh.backends.shm import shared_memory
from gradmesh.backends.shm.shared_memory import Segment
from gradmesh.errors import MismatchError
from gradmesh.ops.transport import bytes_of

_HEADER = struct.Struct("<qqqq")  # tag, number of the dtype, elements, bytes


class Send:
    """A tensor to send. `ended` is called when all its bytes are in the ring."""

    def __init__(self, tensor: Tensor, target: int, tag: int) -> None:
        self.bytes = bytes_of(tensor)
        self.header = _HEADER.pack(tag, DTYPE_NUMBER[tensor.dtype], tensor.numel(), self.bytes.numel())
        self.target = target
        self.position = -_HEADER.size
        self.done = False
        self.ended: Callable[[], object] | None = None


class Receive:
    """A tensor that waits for a message from a rank, or from any rank (`source` None).

    `after` is called when the message is in the tensor, before the receive is done; `ended` when it is done.
    """

    def __init__(
        self, tensor: Tensor, source: int | None, tag: int, after: Callable[[], object] | None = None
    ) -> None:
        self.tensor = tensor
        self.after = after
        self.inference = tensor.is_inference()
        self.source = source
        self.tag = tag
        self.came_from = -1
        self.done = False
        self.ended: Callable[[], object] | None = None
        self.misfit: str | None = None


class _Incoming:
    """A message that is being read, or stored until a receive matches it."""

    def __init__(self, source: int, header: bytes) -> None:
        self.source = source
        self.tag, self.number, self.elements, size = _HEADER.unpack(header)
        self.size = size
        self.position = 0
        self.receive: Receive | None = None
        self.bytes: Tensor | None = None

    def fits(self, tensor: Tensor) -> bool:
        return (DTYPE_NUMBER[tensor.dtype], tensor.numel()) == (self.number, self.elements)

    def __str__(self) -> str:
        return f"{_show(DTYPES[self.number])}, {self.elements} elements, tag {self.tag}"


class P2PChannel:
    """The messages of one rank in a group."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._rank, self._size, self._ring = segment.rank, segment.size, segment.chunk
        self._piece = self._ring // 4
        self._written = [0] * self._size
        self._read = [0] * self._size
        self._leaving: dict[int, deque[Send]] = {}
        self._coming: dict[int, _Incoming] = {}
        self._aside: list[_Incoming] = []
        self._asked: list[Receive] = []

    @property
    def busy(self) -> bool:
        """Whether messages are pending."""
        return bool(self._leaving or self._asked)

    @property
    def inference(self) -> bool:
        """Whether a receiving tensor can only be written in inference mode."""
        return any(receive.inference for receive in self._asked)

    @property
    def under_way(self) -> int:
        """The number of pending messages."""
        return sum(map(len, self._leaving.values())) + len(self._asked)

    def send(self, send: Send) -> None:
        """Start to send; continued in `progress`."""
        self._leaving.setdefault(send.target, deque()).append(send)
        self._push(send.target)

    def receive(self, receive: Receive) -> None:
        """Start to receive; continued in `progress`."""
        for kept in self._aside:
            if kept.receive is None and kept.tag == receive.tag and receive.source in (None, kept.source):
                self._aside.remove(kept)
                kept.receive = receive
                if kept.position == kept.size:
                    self._hand_over(kept)
                else:
                    self._asked.append(receive)
                return
        self._asked.append(receive)
        self.progress()

    def progress(self) -> None:
        """Write as far as there is space, and read what has arrived for pending receives."""
        for target in list(self._leaving):
            self._push(target)
        for source in self._sources():
            self._pull(source)

    def sleep_on(self, waits_for: Send | Receive) -> tuple[int, int] | None:
        """The address and value of the word that changes when it can progress."""
        if isinstance(waits_for, Send):
            pair = self._rank * self._size + waits_for.target
            return self._segment.read_word(pair), self._segment.read[pair]
        if waits_for.source is None:
            return None
        pair = waits_for.source * self._size + self._rank
        return self._segment.written_word(pair), self._read[waits_for.source]

    def only_word(self) -> tuple[int, int] | None:
        """The same, if exactly one message is pending."""
        if self.under_way != 1:
            return None
        if self._asked:
            return self.sleep_on(self._asked[0])
        return self.sleep_on(next(iter(self._leaving.values()))[0])

    def needs(self, waits_for: Send | Receive) -> Sequence[int]:
        """The ranks that it needs to progress."""
        if isinstance(waits_for, Send):
            return [waits_for.target]
        if waits_for.source is not None:
            return [waits_for.source]
        others = [rank for rank in range(self._size) if rank != self._rank]
        gone = {*self._segment.peers.dead(others), *filter(self._segment.away, others)}
        return others if len(gone) == len(others) else []

    def _sources(self) -> Iterator[int]:
        """The ranks from which messages are being read or expected."""
        if not self._asked and not self._coming:
            return iter(())
        if any(receive.source is None for receive in self._asked):
            return iter(range(self._size))
        return iter(
            {*self._coming, *(receive.source for receive in self._asked if receive.source is not None)}
        )

    def _push(self, target: int) -> None:
        """Write to a ring as far as there is space."""
        pair = self._rank * self._size + target
        leaving = self._leaving[target]
        while leaving:
            send = leaving[0]
            rest = send.bytes.numel() - send.position
            # In pieces of a minimum size, so that the receiver can read while the sender writes.
            count = min(rest, self._piece)
            if self._ring - (self._written[target] - self._segment.read[pair]) < count:
                return
            shared_memory.fence()
            if send.position < 0:
                self._write_raw(pair, self._written[target], send.header)
                self._written[target] += _HEADER.size
                count -= _HEADER.size
                send.position = 0
            if count:
                for ring, at, length in self._stretches(pair, self._written[target], count):
                    ring[:length].copy_(send.bytes[send.position + at : send.position + at + length])
                send.position += count
                self._written[target] += count
            shared_memory.fence()
            self._segment.written[pair] = self._written[target]
            shared_memory.wake(self._segment.written_word(pair))
            if send.position == send.bytes.numel():
                leaving.popleft()
                _end(send)
        del self._leaving[target]

    def _write_raw(self, pair: int, start: int, data: bytes) -> None:
        raw, at = self._segment.raw_rings[pair], start % self._ring
        first = data[: self._ring - at]
        raw[at : at + len(first)] = first
        raw[: len(data) - len(first)] = data[len(first) :]

    def _stretches(self, pair: int, start: int, count: int) -> Iterator[tuple[Tensor, int, int]]:
        """The location of `count` bytes from `start` in a ring: one range, or two if it wraps around."""
        ring = self._segment.rings[pair]
        at = start % self._ring
        first = min(count, self._ring - at)
        yield ring[at:], 0, first
        if first < count:
            yield ring, first, count - first

    def _pull(self, source: int) -> None:
        """Read from a ring what has arrived."""
        pair = source * self._size + self._rank
        while True:
            available = self._segment.written[pair] - self._read[source]
            coming = self._coming.get(source)
            if coming is None:
                if available < _HEADER.size:
                    return
                shared_memory.fence()
                coming = self._match(source, self._peek(pair, source))
                if coming is None:
                    return
                self._coming[source] = coming
                self._take(pair, source, _HEADER.size)
                available -= _HEADER.size
            count = min(available, coming.size - coming.position)
            if count and coming.bytes is not None:
                shared_memory.fence()
                for ring, at, length in self._stretches(pair, self._read[source], count):
                    coming.bytes[coming.position + at : coming.position + at + length].copy_(ring[:length])
                coming.position += count
                self._take(pair, source, count)
            if coming.position < coming.size:
                return
            del self._coming[source]
            if coming.receive is not None:
                self._hand_over(coming)

    def _peek(self, pair: int, source: int) -> bytes:
        raw, at = self._segment.raw_rings[pair], self._read[source] % self._ring
        first = bytes(raw[at : at + _HEADER.size])
        return first + bytes(raw[: _HEADER.size - len(first)])

    def _take(self, pair: int, source: int, count: int) -> None:
        self._read[source] += count
        shared_memory.fence()
        self._segment.read[pair] = self._read[source]
        shared_memory.wake(self._segment.read_word(pair))

    def _match(self, source: int, header: bytes) -> _Incoming | None:
        """The first message in a ring, if it should be read now."""
        coming = _Incoming(source, header)
        taken = {id(each.receive) for each in (*self._coming.values(), *self._aside)}
        asked = [r for r in self._asked if id(r) not in taken and r.source in (None, source)]
        if not asked:
            return None
        coming.receive = next((receive for receive in asked if receive.tag == coming.tag), None)
        if coming.receive is not None and coming.fits(coming.receive.tensor):
            coming.bytes = bytes_of(coming.receive.tensor)
        else:
            with torch.inference_mode(False):  # it may be filled in a different mode
                coming.bytes = torch.empty(coming.size, dtype=torch.uint8, device="cpu")
            if coming.receive is None:
                self._aside.append(coming)
        return coming

    def _hand_over(self, coming: _Incoming) -> None:
        """Complete a receive with an arrived message."""
        receive = coming.receive
        if receive is None or coming.bytes is None:
            return
        target = bytes_of(receive.tensor)
        if not coming.fits(receive.tensor):
            receive.misfit = str(coming)
        elif coming.bytes.data_ptr() != target.data_ptr():
            target.copy_(coming.bytes)
        if receive.after is not None and receive.misfit is None:
            receive.after()
        receive.came_from = coming.source
        if receive in self._asked:
            self._asked.remove(receive)
        _end(receive)


def _end(under_way: Send | Receive) -> None:
    """Mark a message as completed."""
    under_way.done = True
    if under_way.ended is not None:
        under_way.ended()


def misfit(receive: Receive, group: str) -> MismatchError:
    """The error of a receive whose tensor does not match the message."""
    tensor = receive.tensor
    return mismatched_message(
        f"group '{group}'",
        f"the message of rank {receive.came_from}: {receive.misfit}",
        f"{_show(tensor.dtype)}, {tensor.numel()} elements, tag {receive.tag}",
    )


def _show(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
