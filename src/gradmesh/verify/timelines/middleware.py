"""Transport middleware that receives the kind and size of each transfer.

Names and sizes are those of the simulator (`gradmesh.verify.simulator.counting`): `payload` is the size of this rank's
input, `sent` the bytes that it sends to others, independent of the algorithm. For a gather both are those of the rank
with the longest part; for an exchange with uneven parts those of this rank.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from torch import Tensor

from gradmesh.transport import Transport

__all__ = ["Middleware", "Transfer"]

T = TypeVar("T")


class Transfer(NamedTuple):
    """A transfer: one primitive of a transport.

    Attributes:
        op: its kind, as in an `Event` of the simulator.
        payload: the bytes of this rank's input.
        sent: the bytes that this rank sends to others.
    """

    op: str
    payload: int
    sent: float


class Middleware(Transport):
    """A transport that delegates to another one.

    Args:
        inner: the other transport.
    """

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner.axis, inner.call_check)
        self.inner = inner

    @abc.abstractmethod
    def through(self, transfer: Transfer, run: Callable[[], T]) -> T:
        """Run a transfer.

        Args:
            transfer: its kind and size.
            run: runs it on the inner transport.
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
        """Send the parts for others."""
        width = flat.itemsize
        transfer = Transfer("all_to_all", sum(send) * width, (sum(send) - send[self.axis.rank]) * width)
        return self.through(transfer, lambda: self.inner.exchange(flat, send, receive, shape, even=even))

    def gather(
        self, flat: Tensor, counts: Sequence[int], shape: Sequence[int] | None = None, *, even: bool = False
    ) -> Tensor:
        """Send the local part to each other rank."""
        local = max(counts) * flat.itemsize
        transfer = Transfer("all_gather", local, local * (self.axis.size - 1))
        return self.through(transfer, lambda: self.inner.gather(flat, counts, shape, even=even))

    def sum_and_scatter(
        self, flat: Tensor, counts: Sequence[int], shape: Sequence[int], *, even: bool = False
    ) -> Tensor:
        """Send the terms of the others' parts."""
        width = flat.itemsize
        transfer = Transfer("reduce_scatter", sum(counts) * width, (sum(counts) - min(counts)) * width)
        return self.through(transfer, lambda: self.inner.sum_and_scatter(flat, counts, shape, even=even))

    def sum(self, x: Tensor) -> Tensor:
        """Send the terms of the others' parts, and the local part of the result to each other rank."""
        return self.through(self._sum(x), lambda: self.inner.sum(x))

    def fold(self, x: Tensor, fold: Callable[[Tensor], Tensor]) -> Tensor:
        """Send as much as for a sum."""
        return self.through(self._sum(x), lambda: self.inner.fold(x, fold))

    def _sum(self, x: Tensor) -> Transfer:
        payload, size = x.numel() * x.itemsize, self.axis.size
        return Transfer("all_reduce", payload, 2 * payload * (size - 1) / size)

    def sum_at(self, x: Tensor, root: int) -> Tensor:
        """Send the operand, on every rank but the root."""
        payload = x.numel() * x.itemsize
        transfer = Transfer("reduce", payload, 0 if self.axis.rank == root else payload)
        return self.through(transfer, lambda: self.inner.sum_at(x, root))

    def copy_from(self, x: Tensor, root: int) -> Tensor:
        """Send the operand to each other rank, at the root."""
        payload = x.numel() * x.itemsize
        transfer = Transfer(
            "broadcast", payload, payload * (self.axis.size - 1) if self.axis.rank == root else 0
        )
        return self.through(transfer, lambda: self.inner.copy_from(x, root))

    def relay(self, x: Tensor, to: int | None, source: int | None, shape: Sequence[int]) -> Tensor | None:
        """Send the operand, if it goes to another rank."""
        payload = x.numel() * x.itemsize
        transfer = Transfer("permute", payload, 0 if to in (None, self.axis.rank) else payload)
        return self.through(transfer, lambda: self.inner.relay(x, to, source, shape))

    def compare(self) -> None:
        """Send nothing that counts."""
        self.through(Transfer("barrier", 0, 0), self.inner.compare)

    def post(self, x: Tensor, peer: int, greeting: str) -> None:
        """Send the message."""
        payload = x.numel() * x.itemsize
        self.through(Transfer("send", payload, payload), lambda: self.inner.post(x, peer, greeting))

    def fetch(self, out: Tensor, peer: int, greeting: str) -> str | None:
        """The payload is the size of the received message."""
        transfer = Transfer("recv", out.numel() * out.itemsize, 0)
        return self.through(transfer, lambda: self.inner.fetch(out, peer, greeting))

    def withdraw_message(self, peer: int, said: str) -> None:
        """Not counted."""
        self.inner.withdraw_message(peer, said)

    def pass_over(self, peer: int) -> None:
        """Not counted."""
        self.inner.pass_over(peer)

    def withdraw(self, error: Exception) -> None:
        """Not counted."""
        self.inner.withdraw(error)
