"""Messages from one rank to another over torch.distributed, which only these two know of.

A message between CPUs is preceded by a greeting of fixed length that says what it is, so that a receiver that expects
something else can say so. What is sent is copied first and kept until it has gone, so that the sender can go on.
"""

from __future__ import annotations

import atexit
import contextlib
from collections import deque
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from gradmesh.axis import Axis
from gradmesh.state import rank_state
from gradmesh.wire.packing import flat_memory

__all__ = ["post", "receive", "settle"]

_TAG = 7103
"""Keeps these messages apart from those that users send on the same group."""

_GREETING = 128
"""Bytes of a greeting."""

_OUTSTANDING = 256
"""Messages that may be under way from a rank before a further one waits for the oldest."""


def post(message: Tensor, axis: Axis, peer: int, greeting: str) -> None:
    """Send a dense tensor to one rank and go on; it is kept until it has gone, and must not be written any more."""
    state = rank_state()
    posted = state.posted
    if not state.waits_at_exit:
        state.waits_at_exit = True
        atexit.register(_last, posted)
    parts = [flat_memory(message)]
    if message.device.type == "cpu":
        parts.insert(0, torch.tensor(list(_padded(greeting)), dtype=torch.uint8, device="cpu"))
    for part in parts:
        work = dist.isend(part, group_dst=peer, group=axis.group, tag=_TAG)
        if work is not None:  # torch's type allows for a rank that is not in the group
            posted.append((part, work))
    settle(_OUTSTANDING)


def receive(out: Tensor, axis: Axis, peer: int, greeting: str) -> str | None:
    """Receive a tensor from one rank, in place; returns what came instead if it greets otherwise."""
    if out.device.type == "cpu":
        heard = torch.empty(_GREETING, dtype=torch.uint8, device="cpu")
        dist.recv(heard, group_src=peer, group=axis.group, tag=_TAG)
        said = bytes(heard.tolist())
        if said != _padded(greeting):
            return said.rstrip().decode(errors="replace")
    dist.recv(flat_memory(out), group_src=peer, group=axis.group, tag=_TAG)
    return None


def settle(outstanding: int = 0) -> None:
    """Wait until no more than so many posted messages are under way from this rank."""
    posted = rank_state().posted
    while len(posted) > outstanding:
        _, oldest = posted.popleft()
        oldest.wait()


def _padded(greeting: str) -> bytes:
    return greeting.encode()[:_GREETING].ljust(_GREETING)


def _last(posted: deque[tuple[Tensor, dist.Work]]) -> None:
    """Let messages go before the process does, if there is still a group to carry them."""
    with contextlib.suppress(RuntimeError, ValueError):
        for _, work in posted:
            work.wait(timedelta(seconds=30))
