"""A transport that moves everything by another one, and says of each motion what it is and how many bytes it sends.

The words and the bytes are those of the simulator (`gradmesh.verify.simulator.counting`): `payload` is what this rank
hands in, `sent` what it has to give to others, by no particular algorithm. Of a gather both are those of the rank with
the longest part, since every rank is told all lengths; of an exchange with uneven parts they are this rank's own.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from torch import Tensor

from gradmesh.transport import Transport

__all__ = ["Motion", "Through"]

T = TypeVar("T")


class Motion(NamedTuple):
    """A motion of a carrier.

    Attributes:
        op: what travels, as in an `Event` of the simulator.
        payload: bytes that this rank hands in.
        sent: bytes that this rank has to give to others.
    """

    op: str
    payload: int
    sent: float


class Through(Transport):
    """A transport around another one.

    Args:
        inner: the transport that moves.
    """

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner.axis, inner.call_check)
        self.inner = inner

    @abc.abstractmethod
    def through(self, motion: Motion, move: Callable[[], T]) -> T:
        """Make a motion.

        Args:
            motion: what it is.
            move: makes it, by the transport inside.
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
        """Sends the parts for others."""
        width = flat.itemsize
        motion = Motion("all_to_all", sum(send) * width, (sum(send) - send[self.axis.rank]) * width)
        return self.through(motion, lambda: self.inner.exchange(flat, send, receive, shape, even=even))

    def gather(
        self, flat: Tensor, counts: Sequence[int], shape: Sequence[int] | None = None, *, even: bool = False
    ) -> Tensor:
        """Sends the own part to each of the others."""
        own = max(counts) * flat.itemsize
        motion = Motion("all_gather", own, own * (self.axis.size - 1))
        return self.through(motion, lambda: self.inner.gather(flat, counts, shape, even=even))

    def sum_and_scatter(
        self, flat: Tensor, counts: Sequence[int], shape: Sequence[int], *, even: bool = False
    ) -> Tensor:
        """Sends the terms of the others' parts."""
        width = flat.itemsize
        motion = Motion("reduce_scatter", sum(counts) * width, (sum(counts) - min(counts)) * width)
        return self.through(motion, lambda: self.inner.sum_and_scatter(flat, counts, shape, even=even))

    def sum(self, x: Tensor) -> Tensor:
        """Sends the terms of the others' parts, and the own part to each of the others."""
        return self.through(self._sum(x), lambda: self.inner.sum(x))

    def fold(self, x: Tensor, fold: Callable[[Tensor], Tensor]) -> Tensor:
        """Sends as much as a sum."""
        return self.through(self._sum(x), lambda: self.inner.fold(x, fold))

    def _sum(self, x: Tensor) -> Motion:
        payload, size = x.numel() * x.itemsize, self.axis.size
        return Motion("all_reduce", payload, 2 * payload * (size - 1) / size)

    def sum_at(self, x: Tensor, root: int) -> Tensor:
        """Sends the operand, on every rank but the root."""
        payload = x.numel() * x.itemsize
        motion = Motion("reduce", payload, 0 if self.axis.rank == root else payload)
        return self.through(motion, lambda: self.inner.sum_at(x, root))

    def copy_from(self, x: Tensor, root: int) -> Tensor:
        """Sends the operand to each of the others, at the root."""
        payload = x.numel() * x.itemsize
        motion = Motion("broadcast", payload, payload * (self.axis.size - 1) if self.axis.rank == root else 0)
        return self.through(motion, lambda: self.inner.copy_from(x, root))

    def relay(self, x: Tensor, to: int | None, source: int | None, shape: Sequence[int]) -> Tensor | None:
        """Sends the operand, if it goes to another rank."""
        payload = x.numel() * x.itemsize
        motion = Motion("permute", payload, 0 if to in (None, self.axis.rank) else payload)
        return self.through(motion, lambda: self.inner.relay(x, to, source, shape))

    def compare(self) -> None:
        """Sends nothing that counts."""
        self.through(Motion("barrier", 0, 0), self.inner.compare)

    def post(self, x: Tensor, peer: int, greeting: str) -> None:
        """Sends the message."""
        payload = x.numel() * x.itemsize
        self.through(Motion("send", payload, payload), lambda: self.inner.post(x, peer, greeting))

    def fetch(self, out: Tensor, peer: int, greeting: str) -> str | None:
        """The payload is that of the message that comes."""
        motion = Motion("recv", out.numel() * out.itemsize, 0)
        return self.through(motion, lambda: self.inner.fetch(out, peer, greeting))

    def withdraw_message(self, peer: int, said: str) -> None:
        """Nothing that counts."""
        self.inner.withdraw_message(peer, said)

    def pass_over(self, peer: int) -> None:
        """Nothing that counts."""
        self.inner.pass_over(peer)

    def withdraw(self, error: Exception) -> None:
        """Nothing that counts."""
        self.inner.withdraw(error)
