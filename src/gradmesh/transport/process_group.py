"""The transports: process groups of torch.distributed and of gradmesh, one rank, and compiled programs.

A point-to-point message between CPUs is preceded by a header of fixed length with its description and size, so that a
receiver that expects something else can raise and discard it. The tensor is copied and kept until it is sent, so that
the sender never blocks.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from gradmesh._torch import functional
from gradmesh.backends.own_group import FLAGS, FlatGroup, OwnGroup, OwnWork
from gradmesh.ops.transport import Transport, as_flat, bytes_of, dense, flattened
from gradmesh.runtime.mesh import Axis
from gradmesh.runtime.state import INSTALLED, RankState, check_level, instruments, rank_state
from gradmesh.transport import packing
from gradmesh.transport.call_checks import (
    OpCallCheck,
    agreed,
    balance,
    calls_of,
    failed_ranks_named,
    refusal_text,
    signed,
)
from gradmesh.transport.comm_thread import AsyncAxis
from gradmesh.transport.packing import CARRIED, flat_memory, sent_as, with_memory

_TAG = 7103
"""Separates these messages from those that users send on the same group."""

_LENGTH = 8
"""Bytes of the number at the beginning of a header: the bytes that follow it."""

_GREETING = 120
"""Bytes of the rest: the description, which has to be the same on both ends."""

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
    for part in parts:
        work = _send(part, axis, peer)
        if work is not None:
            posted.append((part, work))
    _forget_gone(state)


def receive(out: Tensor, axis: Axis, peer: int, greeting: str) -> str | None:
    """Receive a tensor from one rank, in place; returns the sender's description if it differs from `greeting`."""
    if out.device.type != "cpu":
        _recv(flat_memory(out), axis, peer)
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
    _recv(bytes_of(out), axis, peer)
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


def _send(part: Tensor, axis: Axis, peer: int) -> dist.Work | None:
    """`isend` returns None on a rank that is not in the group."""
    return dist.isend(part, group_dst=peer, group=axis.group, tag=_TAG)


def _recv(part: Tensor, axis: Axis, peer: int) -> None:
    dist.recv(part, group_src=peer, group=axis.group, tag=_TAG)


def _header(length: int, greeting: str) -> Tensor:
    header = length.to_bytes(_LENGTH, "little", signed=True) + _padded(greeting)
    return torch.tensor(list(header), dtype=torch.uint8, device="cpu")


def _recv_header(axis: Axis, peer: int) -> tuple[int, bytes]:
    header = torch.empty(_LENGTH + _GREETING, dtype=torch.uint8, device="cpu")
    _recv(header, axis, peer)
    raw = bytes(header.tolist())
    return int.from_bytes(raw[:_LENGTH], "little", signed=True), raw[_LENGTH:]


def _discard(length: int, axis: Axis, peer: int) -> None:
    if length != _NOTHING:
        _recv(torch.empty(length, dtype=torch.uint8, device="cpu"), axis, peer)


def _padded(greeting: str) -> bytes:
    return greeting.encode()[:_GREETING].ljust(_GREETING)


def _flush_at_exit(posted: deque[tuple[Tensor, dist.Work]]) -> None:
    """Wait at exit for pending sends, if the group still exists."""
    with contextlib.suppress(RuntimeError, ValueError):
        for _, work in list(posted):
            work.wait(timedelta(seconds=30))


# torch 2.13 renamed both; the old names only warn there.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def exchange_memory(
    out: Tensor, flat: Tensor, send: Sequence[int], receive: Sequence[int], group: dist.ProcessGroup
) -> None:
    """Exchange between dense buffers of any dtype; the counts are elements of it."""
    width = flat.dtype.itemsize // sent_as(flat.dtype).itemsize
    dist.all_to_all_single(
        flat_memory(out),
        flat_memory(with_memory(flat)),
        [n * width for n in receive],
        [n * width for n in send],
        group=group,
    )


class GroupTransport(Transport):
    """Base of the transports below: results in recycled memory."""

    axis: Axis
    call_check: OpCallCheck | None

    def room(self, like: Tensor, shape: Sequence[int]) -> Tensor:
        """Memory for a result, recycled if it is large."""
        if type(like) is Tensor and math.prod(shape) * like.dtype.itemsize < packing.SMALLEST:
            return like.new_empty(shape)
        return packing.empty(shape, like.dtype, like.device)


HEAD = 16
"""Bytes of the call check in the first message of a call: the digest, and whether the data follows it."""

INLINE = 1008
"""Bytes for each rank that are sent with the call check: together less than a packet of Ethernet."""

DIRECT = 1 << 16
"""Bytes of a rank's operand up to which an all-to-all is faster than the ring or tree of the backend."""


class TorchGroup(GroupTransport):
    """An axis with a group of torch.distributed: Gloo, NCCL, MPI, and whatever else is registered.

    These backends do not compare the ranks' calls: operands of unexpected sizes abort the process or give garbage, and
    different collectives hang. So a checked call of CPU tensors begins with a message to each rank, which holds a
    digest of the call, and the data if it is short; where digests differ, the ranks exchange descriptions. Its length
    is always the same, since the ranks may make different calls. For tensors on other devices, and at level "deferred",
    the comparison follows later (`deferred_check.py`): an exchange before the call would have to wait for the device.
    """

    def exchange(
        self,
        flat: Tensor,
        send: Sequence[int],
        receive: Sequence[int],
        shape: Sequence[int] | None = None,
        *,
        even: bool = False,
    ) -> Tensor:
        """`all_to_all_single`."""
        width = flat.dtype.itemsize

        def fill(data: Tensor) -> None:
            for row, part in zip(data, _bytes(flat).split([n * width for n in send]), strict=True):
                row[: part.numel()] = part

        got = self._agree(send, receive, fill if max(*send, *receive) * width <= INLINE else None)
        out = self.room(flat, [sum(receive)] if shape is None else shape)
        if got is not None:
            for row, part in zip(got, _bytes(out).split([n * width for n in receive]), strict=True):
                part.copy_(row[: part.numel()])
        elif even:
            dist.all_to_all_single(flat_memory(out), flat_memory(with_memory(flat)), group=self.axis.group)
        else:
            exchange_memory(out, flat, send, receive, self.axis.group)
        return out

    def gather(
        self, flat: Tensor, counts: Sequence[int], shape: Sequence[int] | None = None, *, even: bool = False
    ) -> Tensor:
        """`all_gather_single` where all lengths are equal; backends have no ragged form of it."""
        if not even and len(set(counts)) > 1:
            return super().gather(flat, counts, shape)
        got = self._agree_with(flat)
        if got is None and self._directly(flat):
            return super().gather(flat, counts, shape, even=even)
        out = self.room(flat, [sum(counts)] if shape is None else shape)
        if got is None:
            _all_gather(flat_memory(out), flat_memory(with_memory(flat)), group=self.axis.group)
        else:
            _bytes(out).view(got.shape).copy_(got)
        return out

    def sum_and_scatter(
        self, flat: Tensor, counts: Sequence[int], shape: Sequence[int], *, even: bool = False
    ) -> Tensor:
        """`reduce_scatter_single` on devices, where all lengths are equal and the backend can add.

        With Gloo an exchange and a local sum, since its reduce_scatter sends the bytes of an all_reduce.
        """
        if self._on_gloo(flat) or flat.dtype not in CARRIED or (not even and len(set(counts)) > 1):
            return super().sum_and_scatter(flat, counts, shape, even=even)
        self._agree()
        out = self.room(flat, shape)
        _reduce_scatter(flat_memory(out), flat_memory(with_memory(flat)), group=self.axis.group)
        return out

    def sum(self, x: Tensor) -> Tensor:
        """`all_reduce`, of a dense copy: Gloo adds tensors in the order of their memory."""
        if x.dtype not in CARRIED:
            return super().sum(x)
        got = self._agree_with(as_flat(x))
        if got is not None:
            return _as(got, x).sum(0, dtype=x.dtype)
        if self._directly(x):
            return super().sum(x)
        out = self.copy(x)
        dist.all_reduce(flat_memory(out), group=self.axis.group)
        return out

    def sum_at(self, x: Tensor, root: int) -> Tensor:
        """`reduce`."""
        if x.dtype not in CARRIED:
            return super().sum_at(x, root)
        at_root = self.axis.rank == root
        got = self._agree_with(as_flat(x), to=root)
        if got is not None:
            return _as(got, x).sum(0, dtype=x.dtype) if at_root else x.new_zeros(x.shape)
        out = self.copy(x)
        dist.reduce(flat_memory(out), group_dst=root, group=self.axis.group)
        # Backends leave partial sums on the other ranks.
        return out if at_root else out.zero_()

    def copy_from(self, x: Tensor, root: int) -> Tensor:
        """`broadcast`."""
        at_root = self.axis.rank == root
        got = self._agree_with(as_flat(x))
        out = self.copy(x) if at_root else self.room(x, x.shape)
        if got is None:
            dist.broadcast(flat_memory(out), group_src=root, group=self.axis.group)
        else:
            _bytes(out).copy_(got[root])
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
        work = _send(header, self.axis, peer)
        if work is not None:
            rank_state().get_or_create(_Outbox).withdrawn.append((header, work))

    def pass_over(self, peer: int) -> None:
        """Have the next `recv` from that rank discard it."""
        rank_state().get_or_create(_Outbox).skipped[self.axis.group, peer] += 1

    # -- comparing

    def compare(self) -> None:
        """Compare the calls only."""
        self._agree()

    def _directly(self, x: Tensor) -> bool:
        """Whether an all-to-all is the fastest way to send an operand to all ranks."""
        return self._on_gloo(x) and x.numel() * x.dtype.itemsize <= DIRECT

    def _on_gloo(self, x: Tensor) -> bool:
        """Whether the backend's collectives are those of Gloo: gradmesh's own choose by size themselves."""
        return x.is_cpu and not isinstance(self.axis.group, FlatGroup)

    def _agree_with(self, flat: Tensor, to: int | None = None) -> Tensor | None:
        """Compare the ranks' calls, and send a dense operand with the check, to all or one rank, if it is short.

        Returns:
            The bytes of every rank's operand, one row each; None if it was not sent.
        """
        size = flat.numel() * flat.dtype.itemsize
        if size > INLINE:
            self._agree()
            return None
        rows = slice(None) if to is None else to
        got = self._agree(fill=lambda data: data[rows, :size].copy_(_bytes(flat)))
        return None if got is None else got[:, :size]

    def _agree(
        self,
        send: Sequence[int] = (),
        receive: Sequence[int] = (),
        fill: Callable[[Tensor], object] | None = None,
    ) -> Tensor | None:
        """Compare the ranks' calls and counts (if these are to be compared), before the first primitive of the call.

        `fill` writes the data for each rank into a row of a tensor; None: it is too long.

        Returns:
            The data from each rank, if no rank's was too long; None: it has to be sent.
        """
        call_check = self.take_check()
        if call_check is None:
            return None
        if call_check.deferred:
            from gradmesh.transport.deferred_check import note

            note(self.axis, call_check, balance(self.axis.rank, send, receive) if send or receive else 0)
            return None
        bits = call_check.digest & ~FLAGS
        head = signed(bits + balance(self.axis.rank, send, receive)) | call_check.flags
        heads, data = self._meet(head, fill)
        if not agreed(heads, bits):
            raise call_check.refusal(self._words(call_check.said()))
        if len({head & FLAGS for head in heads}) > 1:
            call_check.peer_flags = [head & FLAGS for head in heads]
        return data

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
            if not agreed(self._meet(own, None)[0], own):
                self._words(refusal_text(error))

    def _meet(self, own: int, fill: Callable[[Tensor], object] | None) -> tuple[list[int], Tensor | None]:
        """Exchange the first message: every rank's head, and its data unless a rank's is too long."""
        sent = torch.zeros(self.axis.size, HEAD + INLINE, dtype=torch.uint8, device="cpu")
        sent[:, :HEAD] = torch.tensor([own, fill is None], device="cpu").view(torch.uint8)
        if fill is not None:
            fill(sent[:, HEAD:])
        got, group, deferred = torch.empty_like(sent), self.axis.group, rank_state().deferred_check
        with failed_ranks_named(self.axis), _UNWATCHED if deferred is None else deferred.at_once(group):
            dist.all_to_all_single(got, sent, group=group)
        heads, too_long = zip(*got[:, :HEAD].view(torch.int64).tolist(), strict=True)
        return list(heads), None if any(too_long) else got[:, HEAD:]

    def _words(self, own: str) -> list[str]:
        words = [""] * self.axis.size
        dist.all_gather_object(words, own, group=self.axis.group)
        return words


def _bytes(flat: Tensor) -> Tensor:
    """The memory of a dense tensor."""
    return bytes_of(with_memory(flat))


def _as(rows: Tensor, x: Tensor) -> Tensor:
    """Rows of bytes as tensors of the dtype and shape of another one."""
    return rows.contiguous().view(x.dtype).view(len(rows), *x.shape)


class OwnGroupTransport(GroupTransport):
    """An axis whose group is one of gradmesh's own, with shared memory.

    The group is called directly, because torch.distributed's functions take a tenth of a small call. The call check is
    sent with the data at no cost. A rank that fails before it has sent notifies the others.
    """

    def __init__(self, axis: Axis, call_check: OpCallCheck | None = None) -> None:
        self.axis, self.call_check = axis, call_check  # without the call of the base class
        self.group: OwnGroup = axis.group  # type: ignore[assignment]  # by whose class this transport is chosen

    def exchange(
        self,
        flat: Tensor,
        send: Sequence[int],
        receive: Sequence[int],
        shape: Sequence[int] | None = None,
        *,
        even: bool = False,
    ) -> Tensor:
        """`exchange_flat`."""
        out = self.room(flat, [sum(receive)] if shape is None else shape)
        if even:
            self.group.exchange_flat(flattened(out), flat, None, None, self.take_check())
        else:
            self.group.exchange_flat(flattened(out), flat, send, receive, self.take_check())
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
        self,
        flat: Tensor,
        counts: Sequence[int],  # noqa: ARG002 - there is one part, and it comes back
        shape: Sequence[int] | None = None,
        *,
        even: bool = False,  # noqa: ARG002
    ) -> Tensor:
        """A copy, in another shape."""
        out = self.room(flat, flat.shape if shape is None else shape)
        out.view(-1).copy_(flat)
        return out

    sum_and_scatter = gather

    def exchange(
        self,
        flat: Tensor,
        send: Sequence[int],
        receive: Sequence[int],  # noqa: ARG002
        shape: Sequence[int] | None = None,
        *,
        even: bool = False,
    ) -> Tensor:
        """A copy."""
        return self.gather(flat, send, shape, even=even)

    def sum(self, x: Tensor) -> Tensor:
        """A copy."""
        return self.copy(x)

    def fold(self, x: Tensor, fold: Callable[[Tensor], Tensor]) -> Tensor:
        """The fold of one tensor."""
        return fold(self.copy(x).unsqueeze(0))

    def copy_from(self, x: Tensor, root: int) -> Tensor:  # noqa: ARG002
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
        self,
        flat: Tensor,
        send: Sequence[int],
        receive: Sequence[int],
        shape: Sequence[int] | None = None,
        *,
        even: bool = False,  # noqa: ARG002
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
