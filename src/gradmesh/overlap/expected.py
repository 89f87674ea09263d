"""Messages that are received when they are waited for; each finds its own, in whatever order the waits come.

A message is on its way as soon as it was sent, so that nothing has to be done for one that is expected. But messages
between two ranks are taken in the order in which they were sent: who waits for the second one takes the first one too.
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
    """A message that is to be received later."""

    op: Receive
    x: Tensor
    y: Tensor | None = None
    error: Exception | None = None


@dataclass
class _Inbox:
    """The messages that are expected on this rank, by group and sender, the next ones first."""

    expected: dict[tuple[dist.ProcessGroup, int], deque[_Expected]] = field(default_factory=dict)

    def take(self, key: tuple[dist.ProcessGroup, int], until: _Expected | None = None) -> None:
        """Receive what is expected of a rank, to the last, or to one of them."""
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
        then: makes what is returned of the op's result.
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
