"""Async `recv`: messages are received by `wait()`, in any order of the waits.

Messages between two ranks arrive in the order in which they were sent, so waiting for the second one receives the first
one too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor

from gradmesh.autograd import apply
from gradmesh.ops.pair import Receive
from gradmesh.overlap.pending import Pending
from gradmesh.state import rank_state

__all__ = ["receive"]


@dataclass(slots=True)
class _Expected:
    """A message to receive later."""

    op: Receive
    x: Tensor
    y: Tensor | None = None
    error: Exception | None = None


@dataclass
class _Inbox:
    """The expected messages of this rank, by group and sender, in order."""

    expected: dict[tuple[dist.ProcessGroup, int], deque[_Expected]] = field(default_factory=dict)

    def take(self, key: tuple[dist.ProcessGroup, int], until: _Expected | None = None) -> None:
        """Receive all expected messages of a rank, or those up to `until`."""
        while queue := self.expected.get(key):
            message = queue.popleft()
            if not queue:
                del self.expected[key]
            try:
                message.y = apply(message.op, message.x)
            except Exception as error:
                message.error = error
            if message is until:
                return


def receive(op: Receive, x: Tensor, then: Callable[[Tensor], Any], *, later: bool) -> Any:
    """Receive a message, now or when it is waited for.

    Args:
        op: the op.
        x: its operand.
        then: computes the returned value from the op's result.
        later: whether to return a `Pending`.
    """
    inbox, key = rank_state().get_or_create(_Inbox), (op.axis.group, op.peer)
    if not later:
        inbox.take(key)
        return then(apply(op, x))
    message = _Expected(op, x)
    inbox.expected.setdefault(key, deque()).append(message)

    def wait() -> Any:
        if message.y is None and message.error is None:
            inbox.take(key, message)
        if message.error is not None:
            raise message.error
        return then(message.y)  # type: ignore[arg-type]  # it is one or the other

    return Pending(op.verb, str(op.axis), wait, over=None)
