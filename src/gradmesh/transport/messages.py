"""Point-to-point messages over torch.distributed.

A message between CPUs is preceded by a header of fixed length with its description and size, so that a receiver that
expects something else can raise and discard it. The tensor is copied and kept until it is sent, so that the sender
never blocks.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
from collections import Counter, deque
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from gradmesh.axis import Axis
from gradmesh.backends.works import OwnWork
from gradmesh.state import RankState, rank_state
from gradmesh.transport.packing import flat_memory, flattened

__all__ = ["pass_over", "post", "receive", "settle", "withdraw"]

_TAG = 7103
"""Separates these messages from those that users send on the same group."""

_LENGTH = 8
"""Bytes of the number at the beginning of a header: the bytes that follow it."""

_GREETING = 120
"""Bytes of the rest: the description, which has to be the same on both ends."""

_NOTHING = -1
"""The length where no message follows, because the sender aborted."""

_OUTSTANDING = 256
"""Pending sends from which a thread waits for them, on backends whose work objects cannot be polled."""


@dataclass
class _Outbox:
    """A rank's message state besides the posted messages.

    Attributes:
        skipped: how many messages of a rank to discard, by group and rank.
        withdrawn: sent headers without a message; they are not waited for, as the peer may never receive them.
        draining: whether a thread waits for posted messages.
    """

    skipped: Counter[tuple[dist.ProcessGroup, int]] = field(default_factory=Counter)
    withdrawn: list[tuple[Tensor, dist.Work]] = field(default_factory=list)
    draining: bool = False


def post(message: Tensor, axis: Axis, peer: int, greeting: str) -> None:
    """Send a dense tensor to one rank without waiting; the tensor must not be written afterwards."""
    state = rank_state()
    posted = state.posted
    if not state.waits_at_exit:
        state.waits_at_exit = True
        atexit.register(_flush_at_exit, posted)
    if message.device.type == "cpu":
        body = flattened(message).view(torch.uint8)
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
    _recv(flattened(out).view(torch.uint8), axis, peer)
    return None


def withdraw(axis: Axis, peer: int, said: str) -> None:
    """Notify a rank that the message it expects will not be sent."""
    header = _header(_NOTHING, said)
    work = _send(header, axis, peer)
    if work is not None:
        rank_state().get_or_create(_Outbox).withdrawn.append((header, work))


def pass_over(axis: Axis, peer: int) -> None:
    """Discard the next message of a rank when it arrives."""
    rank_state().get_or_create(_Outbox).skipped[axis.group, peer] += 1


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
    while posted and isinstance(posted[0][1], OwnWork) and posted[0][1].is_completed():
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
