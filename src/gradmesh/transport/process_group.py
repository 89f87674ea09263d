"""The transports: process groups of torch.distributed and of gradmesh, one rank, and compiled programs.

A point-to-point message between CPUs is preceded by a header of fixed length with its description and size, so that a
receiver that expects something else can raise and discard it. The tensor is copied and kept until it is sent, so that
the sender never blocks.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import math
import struct
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import lru_cache, partial
from itertools import accumulate
from operator import index

import torch
import torch.distributed as dist
from torch import Tensor

from gradmesh._torch import functional
from gradmesh.backends.own_group import FLAGS, FlatGroup, OwnGroup, OwnWork
from gradmesh.ops.transport import Counts, Transport, as_flat, bytes_of, dense, flattened
from gradmesh.runtime.mesh import Axis
from gradmesh.runtime.state import INSTALLED, RankState, check_level, instruments, rank_state
from gradmesh.transport import packing
from gradmesh.transport.call_checks import (
    OpCallCheck,
    agreed,
    balance,
    calls_of,
    raise_for_failed_ranks,
    refusal_text,
    signed,
)
from gradmesh.transport.comm_thread import AsyncAxis
from gradmesh.transport.packing import CARRIED, flat_memory, sent_as, with_memory

_TAG, _PART = 7103, 7104
"""Separate messages, and the parts of a collective, from what users send on the same group."""

_LENGTH, _GREETING = 8, 120
"""Bytes of a header: the number of bytes that follow it, and the description, which both ends have to share."""

_NOTHING = -1
"""The length where no message follows, because the sender aborted."""

_UNWATCHED = contextlib.nullcontext()

_OUTSTANDING = 256
"""Pending sends from which a thread waits for them, on backends whose work objects cannot be polled."""


@dataclass
class _Outbox:
    """A rank's message state besides the posted messages."""

    # how many messages of a rank to discard, by group and rank
    skipped: Counter[tuple[dist.ProcessGroup, int]] = field(default_factory=Counter)
    # sent headers without a message; they are not waited for, as the peer may never receive them
    withdrawn: list[tuple[Tensor, dist.Work]] = field(default_factory=list)
    draining: bool = False  # whether a thread waits for posted messages


def post(message: Tensor, axis: Axis, peer: int, greeting: str) -> None:
    """Send a dense tensor to one rank without waiting; the tensor must not be written afterwards."""
    state = rank_state()
    posted = state.posted
    if not state.waits_at_exit:
        state.waits_at_exit = True
        atexit.register(_flush_at_exit, posted)
    if message.device.type == "cpu":
        body = bytes_of(message)
        parts = [_header(body.numel(), greeting), body]
    else:
        parts = [flat_memory(message)]
    posted.extend((part, axis.group.send([part], peer, _TAG)) for part in parts)
    _forget_gone(state)


def receive(out: Tensor, axis: Axis, peer: int, greeting: str) -> str | None:
    """Receive a tensor from one rank, in place; returns the sender's description if it differs from `greeting`."""
    if out.device.type != "cpu":
        axis.group.recv([flat_memory(out)], peer, _TAG).wait()
        return None
    skipped, key = rank_state().get_or_create(_Outbox).skipped, (axis.group, peer)
    while skipped[key]:
        length, _ = _recv_header(axis, peer)
        _discard(length, axis, peer)
        skipped[key] -= 1
    length, said = _recv_header(axis, peer)
    if length == _NOTHING or said != _padded(greeting):
        _discard(length, axis, peer)
        return said.rstrip().decode(errors="replace")
    axis.group.recv([bytes_of(out)], peer, _TAG).wait()
    return None


def _noted(
    axis: Axis, verb: str, x: Tensor, peer: int, greeting: str
) -> contextlib.AbstractContextManager[None]:
    """Off the CPU no header is sent: both ends are compared after the message was made, in the block."""
    if x.is_cpu or not check_level():
        return _UNWATCHED
    from gradmesh.transport.deferred_check import note_message

    return note_message(axis, verb, peer, greeting)


def settle(outstanding: int = 0) -> None:
    """Wait until at most `outstanding` posted messages of this rank are pending."""
    _wait_for(rank_state().posted, outstanding)


def _wait_for(posted: deque[tuple[Tensor, dist.Work]], outstanding: int) -> None:
    while len(posted) > outstanding:
        try:
            _, oldest = posted.popleft()
        except IndexError:  # another thread took it
            return
        oldest.wait()


def _forget_gone(state: RankState) -> None:
    """Free what has been sent, without waiting: the receiver may be sending too, which would deadlock."""
    posted = state.posted
    while posted and (isinstance(posted[0][1], OwnWork) or not posted[0][0].is_cpu):
        if not posted[0][1].is_completed():
            break
        posted.popleft()
    if len(posted) <= _OUTSTANDING or isinstance(posted[0][1], OwnWork):
        return
    outbox = state.get_or_create(_Outbox)
    if not outbox.draining:
        outbox.draining = True
        threading.Thread(target=_drain, args=(outbox, posted), name="gradmesh messages", daemon=True).start()


def _drain(outbox: _Outbox, posted: deque[tuple[Tensor, dist.Work]]) -> None:
    try:
        # The rank's next call on the group raises the error.
        with contextlib.suppress(RuntimeError):
            _wait_for(posted, _OUTSTANDING // 2)
    finally:
        outbox.draining = False


def _header(length: int, greeting: str) -> Tensor:
    header = length.to_bytes(_LENGTH, "little", signed=True) + _padded(greeting)
    return torch.tensor(list(header), dtype=torch.uint8, device="cpu")


def _recv_header(axis: Axis, peer: int) -> tuple[int, bytes]:
    header = torch.empty(_LENGTH + _GREETING, dtype=torch.uint8, device="cpu")
    axis.group.recv([header], peer, _TAG).wait()
    raw = bytes(header.tolist())
    return int.from_bytes(raw[:_LENGTH], "little", signed=True), raw[_LENGTH:]


def _discard(length: int, axis: Axis, peer: int) -> None:
    if length != _NOTHING:
        axis.group.recv([torch.empty(length, dtype=torch.uint8, device="cpu")], peer, _TAG).wait()


def _padded(greeting: str) -> bytes:
    return greeting.encode()[:_GREETING].ljust(_GREETING)


def _flush_at_exit(posted: deque[tuple[Tensor, dist.Work]]) -> None:
    """Wait at exit for pending sends, if the group still exists."""
    with contextlib.suppress(RuntimeError, ValueError):
        for _, work in list(posted):
            work.wait(timedelta(seconds=30))


# torch 2.13 renamed them; the old names only warn there.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_EXCHANGE = "all_to_all_single" if hasattr(dist.ProcessGroup, "all_to_all_single") else "alltoall_base"


class GroupTransport(Transport):
    """Base of the transports below: results in recycled memory."""

    axis: Axis
    call_check: OpCallCheck | None

    def room(self, like: Tensor, shape: Sequence[int]) -> Tensor:
        """Memory for a result, recycled if it is large."""
        if type(like) is Tensor and math.prod(shape) * like.dtype.itemsize < packing.SMALLEST:
            return like.new_empty(*shape) if shape else like.new_empty(())  # a tuple takes torch longer
        return packing.empty(shape, like.dtype, like.device)


HEAD, PACKET, PAIRS = 16, 1008, 8
"""Bytes of the call check in a first message, and of data where all of these have one length; the most ranks that send
longer data in messages between pairs."""


def inline(size: int) -> int:
    """The most bytes for each of so many ranks that Gloo sends with the check."""
    return (1 << 21) // size


def direct(size: int) -> int:
    """The most bytes that go to each of so many ranks at once, as rings send less between hosts of several ranks."""
    return max(1 << 16, (1 << 20) // size)


def gathered(size: int) -> int:
    """The most bytes of an operand of which every rank adds all in an all_reduce of so many ranks."""
    return 1 << 20 if size == 2 else max(1 << 10, (1 << 16) // size)


_Parts = Sequence[tuple[int, int]]
"""The part of a buffer for each rank, or from each rank: its first byte, and its number of bytes."""
_HEAD = struct.Struct("=qq")


class _Plan:
    """What a call sends: the part of the operand for each rank, and that of the result from each rank."""

    def __init__(self, send: _Parts, receive: _Parts, checksum: int = 0) -> None:
        self.send, self.receive, self.checksum = send, receive, checksum  # that of counts which ranks compare
        self.longest = max(length for _, length in (*send, *receive))
        self.ends = max(map(sum, send)), max(map(sum, receive))


_Data = tuple[Tensor, Tensor, _Plan]  # a dense operand and result, and what is sent of them


@lru_cache(maxsize=256)
def _exchanged(rank: int, width: int, send: Counts, receive: Counts) -> _Plan:
    """Parts of so many elements, one after another."""
    sent, got = (
        [((end - n) * width, n * width) for n, end in zip(counts, accumulate(counts), strict=True)]
        for counts in (send, receive)
    )
    return _Plan(sent, got, balance(rank, send, receive))


@lru_cache(maxsize=256)
def _same(size: int, nbytes: int) -> _Plan:
    """The same part for every rank."""
    return _Plan([(0, nbytes)] * size, [(source * nbytes, nbytes) for source in range(size)])


@lru_cache(maxsize=256)
def _from_root(rank: int, size: int, nbytes: int, root: int) -> _Plan:
    """The root's part for every other rank."""
    send = [(0, nbytes if rank == root != to else 0) for to in range(size)]
    return _Plan(send, [(0, nbytes if source == root != rank else 0) for source in range(size)])


class _FirstMessages:
    """The memory of a call's first messages, for and from each rank: a head, and at most `room` bytes of data.

    It is written by address: to make a tensor of a part takes longer than to copy it.
    """

    def __init__(self, axis: Axis, room: int | None) -> None:
        self.rank, self.exact, self.room = axis.rank, room is not None, room or PACKET
        self.longest = [HEAD + self.room] * axis.size
        if self.exact:
            self.longest[axis.rank] = HEAD
        *self.places, total = accumulate(self.longest, initial=0)
        self.sent, self.got = (torch.empty(total, dtype=torch.uint8, device="cpu") for _ in range(2))
        self.heads_sent = (ctypes.c_char * total).from_address(self.sent.data_ptr())
        # of a rank's message at its place: its head, and whether its data is too long to be there
        self.head = partial(_HEAD.unpack_from, (ctypes.c_char * total).from_address(self.got.data_ptr()))

    def write(self, own: int, data: _Data | None) -> list[int]:
        """Write this rank's head and short data for each rank, one after another; returns the messages' lengths."""
        lengths, place = [HEAD] * len(self.places) if self.exact else self.longest, 0
        address, room = 0 if data is None else data[0].data_ptr(), self.sent.data_ptr() + HEAD
        for rank in range(len(lengths)):
            _HEAD.pack_into(self.heads_sent, place, own, data is None)
            if data is not None and rank != self.rank:
                first, length = data[2].send[rank]
                ctypes.memmove(room + place, address + first, length)
                if self.exact:
                    lengths[rank] += length
            place += lengths[rank]
        return lengths

    def read(self, out: Tensor, receive: _Parts) -> None:
        """Read the other ranks' data."""
        address, room = out.data_ptr(), self.got.data_ptr() + HEAD
        for rank, (first, length) in enumerate(receive):
            if length and rank != self.rank:
                ctypes.memmove(address + first, room + self.places[rank], length)


class TorchGroup(GroupTransport):
    """An axis with a group of torch.distributed: Gloo, NCCL, MPI, and whatever else is registered.

    These backends do not compare the ranks' calls: operands of unexpected sizes abort the process or give garbage, and
    different collectives hang. So a checked call of CPU tensors begins with a message to each rank, which holds a
    digest of the call, and the data if it is short; where digests differ, the ranks exchange descriptions. Every rank
    expects the longest, since the ranks may make different calls. For tensors on other devices, and at level
    "deferred", the comparison follows later (`deferred_check.py`): an exchange before the call would have to wait for
    the device.
    """

    def exchange(
        self, flat: Tensor, send: Counts, receive: Counts, shape: Counts | None = None, *, even: bool = False
    ) -> Tensor:
        """`all_to_all_single`, or messages between pairs of few ranks."""
        width = flat.dtype.itemsize
        out = self.room(flat, [sum(receive)] if shape is None else shape)
        counts = tuple(map(index, send)), tuple(map(index, receive))  # 2.0 would find the plan of 2
        if not self._deliver(flat, out, _exchanged(self.axis.rank, width, *counts)):
            wide = width // sent_as(flat.dtype).itemsize
            lengths = [n * wide for n in receive], [n * wide for n in send]
            sent = flat_memory(with_memory(flat))
            dist.all_to_all_single(flat_memory(out), sent, *lengths, group=self.axis.group)
        return out

    def gather(
        self, flat: Tensor, counts: Sequence[int], shape: Sequence[int] | None = None, *, even: bool = False
    ) -> Tensor:
        """`all_gather_single` where all lengths are equal; backends have no ragged form of it."""
        size, nbytes = self.axis.size, flat.numel() * flat.dtype.itemsize
        short = nbytes <= direct(size)
        if (short and size > PAIRS and self._on_gloo(flat)) or (not even and len(set(counts)) > 1):
            return super().gather(flat, counts, shape, even=even)
        out = self.room(flat, [sum(counts)] if shape is None else shape)
        if not self._deliver(flat, out, _same(size, nbytes), directly=short or size == 2):
            _all_gather(flat_memory(out), flat_memory(with_memory(flat)), group=self.axis.group)
        return out

    def sum_and_scatter(
        self, flat: Tensor, counts: Sequence[int], shape: Sequence[int], *, even: bool = False
    ) -> Tensor:
        """`reduce_scatter_single` on devices, where all lengths are equal and the backend can add.

        With Gloo an exchange and a local sum, since its reduce_scatter sends the bytes of an all_reduce.
        """
        if self._on_gloo(flat) or flat.dtype not in CARRIED or (not even and len(set(counts)) > 1):
            return super().sum_and_scatter(flat, counts, shape, even=even)
        self._agree(self.take_check())
        out = self.room(flat, shape)
        _reduce_scatter(flat_memory(out), flat_memory(with_memory(flat)), group=self.axis.group)
        return out

    def sum(self, x: Tensor) -> Tensor:
        """`all_reduce`, of a dense copy: Gloo adds tensors in the order of their memory."""
        if x.dtype not in CARRIED:
            return super().sum(x)
        size, nbytes, gloo = self.axis.size, x.numel() * x.dtype.itemsize, self._on_gloo(x)
        if x.is_cpu and nbytes <= (gathered(size) if gloo else self._inline() or PACKET):
            parts = self.gather(as_flat(x), [x.numel()] * size, (size, *x.shape), even=True)
            return parts.sum(0, dtype=x.dtype)
        if gloo and nbytes <= direct(size):
            return super().sum(x)
        self._agree(self.take_check())
        out = self.copy(x)
        dist.all_reduce(flat_memory(out), group=self.axis.group)
        return out

    def sum_at(self, x: Tensor, root: int) -> Tensor:
        """`reduce`, or the sum at the root of short tensors."""
        if x.dtype not in CARRIED:
            return super().sum_at(x, root)
        rank, size, nbytes = self.axis.rank, self.axis.size, x.numel() * x.dtype.itemsize
        if x.is_cpu and nbytes <= min(direct(size), self._inline() or PACKET):
            send = [x.numel() if to == root else 0 for to in range(size)]
            taken = size if rank == root else 0
            rows = self.exchange(as_flat(x), send, [send[rank]] * size, (taken, *x.shape))
            return rows.sum(0, dtype=x.dtype)
        self._agree(self.take_check())
        out = self.copy(x)
        dist.reduce(flat_memory(out), group_dst=root, group=self.axis.group)
        # Backends leave partial sums on the other ranks.
        return out if self.axis.rank == root else out.zero_()

    def copy_from(self, x: Tensor, root: int) -> Tensor:
        """`broadcast`, or messages from the root to few ranks."""
        rank, size, nbytes = self.axis.rank, self.axis.size, x.numel() * x.dtype.itemsize
        out = self.copy(x) if rank == root else self.room(x, x.shape)
        plan = _from_root(rank, size, nbytes, root)
        if not self._deliver(out, out, plan, directly=size == 2 or nbytes <= direct(size)):
            dist.broadcast(flat_memory(out), group_src=root, group=self.axis.group)
        return out

    def post(self, x: Tensor, peer: int, greeting: str) -> None:
        """`isend`."""
        with _noted(self.axis, "send", x, peer, greeting):
            post(self.copy(x), self.axis, peer, greeting)

    def fetch(self, out: Tensor, peer: int, greeting: str) -> str | None:
        """`recv`."""
        with _noted(self.axis, "recv", out, peer, greeting):
            return receive(out, self.axis, peer, greeting)

    def withdraw_message(self, peer: int, said: str) -> None:
        """Send a header without a message."""
        header = _header(_NOTHING, said)
        work = self.axis.group.send([header], peer, _TAG)
        rank_state().get_or_create(_Outbox).withdrawn.append((header, work))

    def pass_over(self, peer: int) -> None:
        """Have the next `recv` from that rank discard it."""
        rank_state().get_or_create(_Outbox).skipped[self.axis.group, peer] += 1

    # -- comparing

    def compare(self) -> None:
        """Compare the calls only."""
        self._agree(self.take_check())

    def _post(self, data: _Data, call_check: OpCallCheck | None) -> list[dist.Work] | None:
        """Begin to exchange long data in messages between pairs of ranks; None: they are not few ranks of Gloo.

        Gloo's own collectives copy more, or wait for a neighbour at each step. What is sent before the calls were
        compared has the digest and number of the call in its tag. Gloo sends a message when the receiver has asked for
        its tag: nothing arrives where another call or length is expected.
        """
        rank, size, group = self.axis.rank, self.axis.size, self.axis.group
        if size > PAIRS or not data[0].is_cpu or not calls_of(group).gloo:
            return None
        # torch's wrapper for debugging refuses collectives after messages whose number differs between the ranks.
        if dist.get_debug_level().name == "DETAIL":  # type: ignore[attr-defined]
            return None
        sent, got, plan = bytes_of(data[0]), bytes_of(data[1]), data[2]
        call = None if call_check is None else (call_check.digest, call_check.calls.number)
        works = []
        for to, source in (((rank + step) % size, (rank - step) % size) for step in range(1, size)):
            first, length = plan.receive[source]
            if length:
                works.append(group.recv([got[first : first + length]], source, _tag(call, length)))
            first, length = plan.send[to]
            if length:
                works.append(group.send([sent[first : first + length]], to, _tag(call, length)))
        return works

    def _inline(self) -> int | None:
        """The most bytes for each rank with the check, where a rank may be sent less than it expects: Gloo on TCP."""
        if sys.platform != "linux":  # Gloo's libuv reads as much as is expected
            return None
        group = self.axis.group
        return inline(self.axis.size) if calls_of(group).gloo else getattr(group, "inline", None)

    def _on_gloo(self, x: Tensor) -> bool:
        """Whether the backend's collectives are those of Gloo: gradmesh's own choose by size themselves."""
        return x.is_cpu and not isinstance(self.axis.group, FlatGroup)

    def _deliver(self, flat: Tensor, out: Tensor, plan: _Plan, *, directly: bool = True) -> bool:
        """Compare the ranks' calls and counts, and send the parts if they go `directly` to each rank.

        That is with the check if they are short, and else in messages between pairs of few ranks.

        Returns:
            Whether the result is there; if not, the caller calls a collective.
        """
        for x, end in zip((flat, out), plan.ends, strict=True):  # which are copied by address
            if end > x.numel() * x.dtype.itemsize:
                raise RuntimeError(f"parts that take {end} bytes of a tensor of shape {list(x.shape)}")
        return self._agree(self.take_check(), (with_memory(flat), out, plan) if directly else None)

    def _agree(self, call_check: OpCallCheck | None, data: _Data | None = None) -> bool:
        """Compare the ranks' calls and counts, before the first primitive of the call.

        Short data is sent with the check, and longer data of few ranks without waiting for the comparison.

        Returns:
            Whether the data was sent.
        """
        works: list[dist.Work] | None = None  # those that send the data; none if it came with the check
        checksum = 0 if data is None else data[2].checksum
        if call_check is not None and not call_check.deferred:
            bits = call_check.digest & ~FLAGS
            memory, works = self._meet(call_check, signed(bits + checksum) | call_check.flags, data)
            heads, long = zip(*map(memory.head, memory.places), strict=True)
            if not agreed(heads, bits):
                raise call_check.refusal(self._words(call_check.said()))
            flags = list(map(FLAGS.__and__, heads))
            if flags.count(flags[0]) < len(flags):
                call_check.peer_flags = flags
            if data is not None and not any(long):
                memory.read(data[1], data[2].receive)
                works = []
            call_check.calls.first_messages.append(memory)
        elif call_check is not None:
            from gradmesh.transport.deferred_check import note

            note(self.axis, call_check, checksum)
        if data is not None and works is None:
            works = self._post(data, call_check)
        if data is None or works is None:
            return False
        flat, out, plan = data
        (first, length), (place, room) = plan.send[self.axis.rank], plan.receive[self.axis.rank]
        ctypes.memmove(out.data_ptr() + place, flat.data_ptr() + first, min(length, room))
        for work in works:
            work.wait()
        if length != room:  # the ranks did not compare it
            raise RuntimeError(f"this rank has {length} bytes for itself, where it expects {room}")
        return True

    def withdraw(self, error: Exception) -> None:
        """Take part in the comparison with a digest that matches no other."""
        call_check = self.take_check()
        if call_check is None:
            return
        if call_check.deferred:
            from gradmesh.transport.deferred_check import note

            call_check.digest = ~call_check.digest
            note(self.axis, call_check, refused=refusal_text(error))
            return
        own = ~call_check.digest & ~FLAGS
        with contextlib.suppress(RuntimeError):  # the caller raises its own error
            memory, _ = self._meet(call_check, own)
            if not agreed([memory.head(place)[0] for place in memory.places], own):
                self._words(refusal_text(error))

    def _meet(
        self, call_check: OpCallCheck, own: int, data: _Data | None = None
    ) -> tuple[_FirstMessages, list[dist.Work] | None]:
        """Exchange the first messages, with this rank's data if it is short, and begin to send it otherwise."""
        axis, deferred = self.axis, rank_state().deferred_check
        kept, works = call_check.calls.first_messages, None
        call_check.calls.met += 1
        try:
            memory: _FirstMessages = kept.pop()
        except IndexError:
            memory = _FirstMessages(axis, self._inline())
        short = data is not None and data[0].is_cpu and data[2].longest <= memory.room
        lengths = memory.write(own, data if short else None)
        try:
            with _UNWATCHED if deferred is None else deferred.at_once(axis):
                meeting = self._all_to_all(memory, lengths)
                if data is not None and not short:
                    works = self._post(data, call_check)
                meeting.wait()
        except RuntimeError as error:
            raise_for_failed_ranks(axis, error)
            raise
        return memory, works

    def _all_to_all(self, memory: _FirstMessages, lengths: list[int]) -> dist.Work:
        """Begin to exchange the first messages in one collective: its ranks wait less often than with messages.

        torch.distributed's own function takes as long as the exchange of a short message.
        """
        exchange: Callable[..., dist.Work] = getattr(self.axis.group, _EXCHANGE)
        return exchange(memory.got, memory.sent[: sum(lengths)], memory.longest, lengths)

    def _words(self, own: str) -> list[str]:
        """Every rank's text.

        Two exchanges between all pairs: after the first, a peer knows what this rank waits for, and its data comes
        before the second. So no rank raises while ranks whose calls agree are sending.
        """
        size, group = self.axis.size, self.axis.group
        text = torch.tensor(list(own.encode()), dtype=torch.uint8, device="cpu")
        lengths = torch.empty(size, dtype=torch.int64, device="cpu")
        dist.all_to_all_single(lengths, torch.full_like(lengths, text.numel()), group=group)
        got = torch.empty(int(lengths.sum()), dtype=torch.uint8, device="cpu")
        dist.all_to_all_single(got, text.repeat(size), lengths.tolist(), [text.numel()] * size, group=group)
        return [bytes(part.tolist()).decode() for part in got.split(lengths.tolist())]


def _tag(call: tuple[int, int] | None, length: int) -> int:
    """The tag of a message: of one call and length, but for one in 2**31, or of the messages without a call."""
    return _PART if call is None else _PART + 1 + hash((*call, length)) % (2**31 - _PART - 1)


class OwnGroupTransport(GroupTransport):
    """An axis whose group is one of gradmesh's own, with shared memory.

    The group is called directly, because torch.distributed's functions take a tenth of a small call. The call check is
    sent with the data at no cost. A rank that fails before it has sent notifies the others.
    """

    def __init__(self, axis: Axis, call_check: OpCallCheck | None = None) -> None:
        self.axis, self.call_check = axis, call_check  # without the call of the base class
        self.group: OwnGroup = axis.group  # type: ignore[assignment]  # by whose class this transport is chosen

    def exchange(
        self, flat: Tensor, send: Counts, receive: Counts, shape: Counts | None = None, *, even: bool = False
    ) -> Tensor:
        """`exchange_flat`."""
        out = self.room(flat, [sum(receive)] if shape is None else shape)
        parts: tuple[Counts | None, Counts | None] = (None, None) if even else (send, receive)
        self.group.exchange_flat(flattened(out), flat, *parts, self.take_check())
        return out

    def gather(
        self, flat: Tensor, counts: Sequence[int], shape: Sequence[int] | None = None, *, even: bool = False
    ) -> Tensor:
        """`all_gather_flat` for equal parts."""
        if not even and len(set(counts)) > 1:
            return super().gather(flat, counts, shape)
        out = self.room(flat, [sum(counts)] if shape is None else shape)
        self.group.all_gather_flat(flattened(out), flat, self.take_check())
        return out

    def sum_and_scatter(
        self, flat: Tensor, counts: Sequence[int], shape: Sequence[int], *, even: bool = False
    ) -> Tensor:
        """`reduce_scatter_flat` for equal parts."""
        if not even and len(set(counts)) > 1:
            return super().sum_and_scatter(flat, counts, shape)
        out = self.room(flat, shape)
        self.group.reduce_scatter_flat(flattened(out), flat, self.take_check())
        return out

    def sum(self, x: Tensor) -> Tensor:
        """`all_reduce_flat`."""
        out = self.room(x, x.shape)
        self.group.all_reduce_flat(flattened(out), as_flat(x), self.take_check())
        return out

    def sum_at(self, x: Tensor, root: int) -> Tensor:
        """`reduce_flat`."""
        at_root = self.axis.rank == root
        out = self.room(x, x.shape) if at_root else torch.zeros(x.shape, dtype=x.dtype, device=x.device)
        self.group.reduce_flat(flattened(out), as_flat(x), root, self.take_check())
        return out

    def copy_from(self, x: Tensor, root: int) -> Tensor:
        """`broadcast_flat`."""
        out = self.room(x, x.shape)
        self.group.broadcast_flat(flattened(out), as_flat(x), root, self.take_check())
        return out

    def relay(self, x: Tensor, to: int | None, source: int | None, shape: Sequence[int]) -> Tensor | None:
        """`relay_flat`, which every rank calls."""
        one = as_flat(x)
        out = self.room(x, [0] if source is None else shape)
        self.group.relay_flat(flattened(out), one if to is not None else one[:0], source, self.take_check())
        return None if source is None else out

    def withdraw(self, error: Exception) -> None:
        """Make the other ranks' call raise."""
        call_check = self.take_check()
        if call_check is not None:
            self.group.withdraw(call_check, refusal_text(error))

    post, fetch = TorchGroup.post, TorchGroup.fetch
    withdraw_message, pass_over = TorchGroup.withdraw_message, TorchGroup.pass_over


class LocalTransport(GroupTransport):
    """An axis of one rank."""

    def gather(
        self, flat: Tensor, counts: Sequence[int], shape: Sequence[int] | None = None, *, even: bool = False
    ) -> Tensor:
        """A copy, in another shape."""
        out = self.room(flat, flat.shape if shape is None else shape)
        out.view(-1).copy_(flat)
        return out

    sum_and_scatter = gather

    def exchange(
        self, flat: Tensor, send: Counts, receive: Counts, shape: Counts | None = None, *, even: bool = False
    ) -> Tensor:
        """A copy."""
        return self.gather(flat, send, shape, even=even)

    def sum(self, x: Tensor) -> Tensor:
        """A copy."""
        return self.copy(x)

    def fold(self, x: Tensor, fold: Callable[[Tensor], Tensor]) -> Tensor:
        """The fold of one tensor."""
        return fold(self.copy(x).unsqueeze(0))

    def copy_from(self, x: Tensor, root: int) -> Tensor:
        """A copy."""
        return self.copy(x)


class TracedLocalTransport(LocalTransport):
    """The same inside a compiled program, where the compiler manages memory."""

    def room(self, like: Tensor, shape: Sequence[int]) -> Tensor:
        """Uninitialised memory, not recycled."""
        return like.new_empty(shape)

    def copy(self, x: Tensor) -> Tensor:
        """A clone."""
        return x.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


class Functional(GroupTransport):
    """An axis inside a compiled program: functional collectives, which a compiler may reorder and bucket.

    For ops that are one collective with the same arguments on every rank. A compiler sees one rank's program only: if
    the programs of the ranks differ, it may order their collectives differently.
    """

    def exchange(
        self, flat: Tensor, send: Counts, receive: Counts, shape: Counts | None = None, *, even: bool = False
    ) -> Tensor:
        """A functional all-to-all."""
        got = functional("all_to_all_single", self.axis.group, dense(flat), list(receive), list(send))
        return got if shape is None else got.view(shape)

    def gather(
        self, flat: Tensor, counts: Sequence[int], shape: Sequence[int] | None = None, *, even: bool = False
    ) -> Tensor:
        """A functional all-gather where all parts are equal."""
        if not even:
            return super().gather(flat, counts, shape)
        out = functional("all_gather_into_tensor", self.axis.group, flat, self.axis.size)
        return out if shape is None else out.view(shape)

    def sum_and_scatter(
        self, flat: Tensor, counts: Sequence[int], shape: Sequence[int], *, even: bool = False
    ) -> Tensor:
        """A functional reduce-scatter where all parts are equal."""
        if not even:
            return super().sum_and_scatter(flat, counts, shape)
        return functional("reduce_scatter_tensor", self.axis.group, flat, "sum", self.axis.size).view(shape)

    def sum(self, x: Tensor) -> Tensor:
        """A functional all-reduce."""
        return functional("all_reduce", self.axis.group, dense(x), "sum")

    def copy_from(self, x: Tensor, root: int) -> Tensor:
        """A functional broadcast."""
        return functional("broadcast", self.axis.group, dense(x), root)

    room, copy = TracedLocalTransport.room, TracedLocalTransport.copy


TRANSPORTS: dict[type[dist.ProcessGroup], type[Transport]] = {}
"""The transport for a class of process group. Others get `OwnGroupTransport` if they are gradmesh's own, else
`TorchGroup`."""


def transport(axis: Axis, call_check: OpCallCheck | None = None) -> Transport:
    """The transport for one op; without a check of its call nothing is compared."""
    if axis.size == 1:
        return LocalTransport(axis)
    if type(axis) is AsyncAxis:
        axis = axis.comm_thread.axis
    if call_check is not None:
        call_check.calls = calls_of(axis.group)
    kind = type(axis.group)
    own = OwnGroupTransport if issubclass(kind, OwnGroup) else TorchGroup
    found = TRANSPORTS.get(kind, own)(axis, call_check)
    if INSTALLED[0]:
        for each in instruments():
            found = each.sending(found)
    return found


def traced_transport(axis: Axis) -> Transport:
    """The transport for one op inside a compiled program."""
    return TracedLocalTransport(axis) if axis.size == 1 else Functional(axis)
