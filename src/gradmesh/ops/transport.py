"""The axis and the transport as ops see them: the ranks, and the few primitives that all ops are made of.

A transport serves one call of an op on one rank: it belongs to an axis and, where calls are compared, to the check of
that call. The ranks of the axis run the same primitives in the same order.

Rules that hold for every primitive:

* Operands are plain tensors of any strides unless the argument is named `flat`: then they are dense, contiguous and
  one-dimensional. No operand is written, and no result shares memory with an operand, also on an axis of one rank.
* Counts are numbers of elements, one for each rank, in rank order. `even` says that all counts are equal on all ranks
  because no sizes were passed: a transport may use it to choose a faster call, and must not depend on it.
* Sums are taken in the operand's dtype, in rank order where the transport does the adding.
* A primitive is blocking: when it returns, its result can be read, and its operand can be written.
* Where the ranks' calls differ, every rank raises the same `MismatchError`, before anything is written.

A transport has to implement `exchange`, and `post` and `fetch` for point-to-point messages. The other primitives fall
back to `exchange`; a transport with a faster implementation overrides them.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from gradmesh.errors import ArgumentError

Counts = Sequence[int]
"""Numbers of elements, one for each rank; or a shape."""


class Axis(Protocol):
    """The ranks that an op runs over; its text is shown in errors."""

    @property
    def rank(self) -> int:
        """The position of this rank, from 0."""

    @property
    def size(self) -> int:
        """How many ranks there are."""


@dataclass(frozen=True)
class PlainAxis:
    """An axis without a process group, for ops that are only described, or run on lists of tensors."""

    rank: int  # the position of this rank, from 0
    size: int  # how many ranks there are
    name: str = "any"  # its name

    def __str__(self) -> str:
        return f"{self.name!r}, rank {self.rank} of {self.size}"


class Transport(abc.ABC):
    """Sends the data of one call of an op.

    Args:
        axis: the ranks that take part.
        call_check: the description of the call that the ranks compare; None: nothing is compared.
    """

    axis: Any
    """An `Axis`; with the process group that the transport serves, if it serves one."""

    def __init__(self, axis: Axis, call_check: Any = None) -> None:
        self.axis = axis
        self.call_check = call_check

    # -- required

    @abc.abstractmethod
    def exchange(
        self, flat: Tensor, send: Counts, receive: Counts, shape: Counts | None = None, *, even: bool = False
    ) -> Tensor:
        """All-to-all: send each rank its part of a flat buffer, and receive a part from each.

        Args:
            flat: this rank's parts for all ranks, one after another in rank order: `sum(send)` elements.
            send: the length of the part for each rank.
            receive: the length of the part from each rank.
            shape: the shape of the result; None: flat.
            even: all lengths are equal, on all ranks.

        Returns:
            The parts from all ranks, in rank order: `sum(receive)` elements.
        """

    # -- messages between two ranks

    def post(self, x: Tensor, peer: int, greeting: str) -> None:  # noqa: ARG002
        """Send a tensor to one rank without waiting for that rank.

        Args:
            x: the message; it may be written as soon as this returns.
            peer: the receiving rank, which calls `fetch`.
            greeting: description of the message; both ends have to pass the same.
        """
        self._no_messages("send")

    def fetch(self, out: Tensor, peer: int, greeting: str) -> str | None:  # noqa: ARG002
        """Receive a tensor from one rank, in place.

        Args:
            out: a dense tensor of the message's shape, which is written.
            peer: the sending rank.
            greeting: description of the message; both ends have to pass the same.

        Returns:
            None; or the sender's description, if it differs (`out` is then undefined).
        """
        self._no_messages("recv")

    def withdraw_message(self, peer: int, said: str) -> None:  # noqa: B027 - most transports have none
        """Notify a rank that the message it expects will not be sent; its `fetch` then returns the reason, `said`."""

    def pass_over(self, peer: int) -> None:  # noqa: B027
        """Discard the next message of a rank when it arrives, because this rank cannot receive it."""

    def _no_messages(self, verb: str) -> NoReturn:
        raise ArgumentError.of(
            "this transport does not support point-to-point messages",
            op=verb,
            axis=str(self.axis),
            expected="a transport that implements post() and fetch()",
            got=type(self).__name__,
            remedy="use gradmesh.permute(x, pairs=[(0, 1)]), which every rank of the axis calls",
        )

    # -- primitives that fall back to it

    def gather(
        self, flat: Tensor, counts: Sequence[int], shape: Sequence[int] | None = None, *, even: bool = False
    ) -> Tensor:
        """All-gather: every rank's flat buffer, one after another.

        Args:
            flat: this rank's buffer, of `counts[rank]` elements.
            counts: the length of every rank's buffer.
            shape: the shape of the result; None: flat.
            even: all lengths are equal, on all ranks.

        Returns:
            `sum(counts)` elements, the same on every rank.
        """
        size = self.axis.size
        return self.exchange(flat.repeat(size), [flat.numel()] * size, counts, shape, even=even)

    def sum_and_scatter(
        self, flat: Tensor, counts: Sequence[int], shape: Sequence[int], *, even: bool = False
    ) -> Tensor:
        """Reduce-scatter: add the ranks' flat buffers and keep this rank's part.

        Args:
            flat: this rank's term of the sum, of `sum(counts)` elements.
            counts: the length of every rank's part.
            shape: the shape of this rank's part, of `counts[rank]` elements.
            even: all lengths are equal, on all ranks.
        """
        mine, size = counts[self.axis.rank], self.axis.size
        # As many bytes as a reduce-scatter sends, and torch adds in rank order.
        parts = self.exchange(flat, counts, [mine] * size, (size, *shape), even=even)
        return parts.sum(0, dtype=flat.dtype)

    def sum(self, x: Tensor) -> Tensor:
        """All-reduce: the sum of every rank's tensor, the same on every rank."""
        return self.fold(x, lambda parts: parts.sum(0, dtype=parts.dtype))

    def sum_at(self, x: Tensor, root: int) -> Tensor:
        """Reduce: the sum of every rank's tensor at the root, zeros of the operand's shape elsewhere."""
        total = self.sum(x)
        return total if self.axis.rank == root else total.zero_()

    def fold(self, x: Tensor, fold: Callable[[Tensor], Tensor]) -> Tensor:
        """All-reduce with any reduction that torch implements.

        It sends the bytes of an all-reduce (reduce-scatter, then all-gather). Each element is reduced on one rank, so
        that the result is bitwise the same on every rank.

        Args:
            x: this rank's tensor, of one shape and dtype on all ranks.
            fold: reduces a tensor whose first dimension is the ranks, in rank order, along that dimension.

        Returns:
            A tensor of the operand's shape.
        """
        one, size = as_flat(x), self.axis.size
        share, more = divmod(one.numel(), size)
        counts = [share + (rank < more) for rank in range(size)]
        mine = counts[self.axis.rank]
        parts = self.exchange(one, counts, [mine] * size, (size, mine))
        return self.gather(fold(parts), counts, x.shape)

    def copy_from(self, x: Tensor, root: int) -> Tensor:
        """Broadcast: the root's tensor on every rank.

        Args:
            x: at the root the value; elsewhere a tensor of the same shape and dtype, whose values are ignored.
            root: the sending rank.
        """
        size, rank = self.axis.size, self.axis.rank
        send = [x.numel() if rank == root else 0] * size
        receive = [x.numel() if source == root else 0 for source in range(size)]
        one = as_flat(x)
        return self.exchange(one.repeat(size) if rank == root else one[:0], send, receive, x.shape)

    def relay(self, x: Tensor, to: int | None, source: int | None, shape: Sequence[int]) -> Tensor | None:
        """Send a tensor to at most one rank, and receive one from at most one rank.

        Args:
            x: the tensor to send.
            to: the receiving rank, whose `source` is this rank; each rank receives from one rank at most.
            source: the rank to receive from.
            shape: the shape of the received tensor.

        Returns:
            The received tensor; None if `source` is None.
        """
        size = self.axis.size
        send, receive = [0] * size, [0] * size
        one = as_flat(x)
        if to is not None:
            send[to] = one.numel()
        if source is not None:
            receive[source] = math.prod(shape)
        got = self.exchange(
            one if to is not None else one[:0], send, receive, None if source is None else shape
        )
        return None if source is None else got

    # -- results

    def room(self, like: Tensor, shape: Sequence[int]) -> Tensor:
        """Memory for a result: dense, uninitialised, of the dtype and on the device of another tensor."""
        return like.new_empty(tuple(shape))

    def copy(self, x: Tensor) -> Tensor:
        """A dense copy of `x`."""
        plain = x.resolve_conj().resolve_neg()
        return self.room(plain, plain.shape).copy_(plain)

    # -- call checks

    def take_check(self) -> Any:
        """The call check, for the first primitive of the call; None afterwards."""
        call_check, self.call_check = self.call_check, None
        if call_check is not None:
            call_check.count()
        return call_check

    def compare(self) -> None:
        """Compare the ranks' calls where the call itself sends nothing."""
        self.gather(torch.zeros(1, device="cpu"), [1] * self.axis.size, even=True)

    def withdraw(self, error: Exception) -> None:  # noqa: B027 - most transports cannot
        """Notify the other ranks that this rank aborts its call, so that they raise instead of waiting.

        Called when an op fails on this rank; has an effect only before the first primitive. A transport without such a
        notification does nothing.
        """


# -- tensors as flat buffers and back


def dense(x: Tensor) -> Tensor:
    """`x` with plain strides and no pending conjugation or sign, copied only if need be."""
    return x.resolve_conj().resolve_neg().contiguous()


def as_flat(x: Tensor) -> Tensor:
    """The elements of any strided tensor as a dense buffer, copied only if need be."""
    if type(x) is not Tensor or x.is_neg() or x.is_conj() or not x.is_contiguous():
        x = dense(x)
    return x if x.dim() == 1 else x.view(-1)


def flattened(x: Tensor) -> Tensor:
    """A dense tensor in one dimension, over the same memory."""
    return x if x.dim() == 1 else x.view(-1)


def bytes_of(x: Tensor) -> Tensor:
    """The bytes of a dense tensor, over the same memory."""
    flat = flattened(x)
    # The stride of one element may be any number, such as the 0 of an expanded gradient.
    return (flat if flat.numel() > 1 else flat.as_strided(flat.shape, (1,))).view(torch.uint8)


def counts(shape: Sequence[int], dim: int, sizes: Sequence[int]) -> list[int]:
    """How many elements each rank's part has, when the parts have these sizes along `dim`."""
    rest = math.prod(shape[:dim]) * math.prod(shape[dim + 1 :])
    return [rest * size for size in sizes]


def pack(x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    """The parts of `x` along `dim`, one after another, as one flat buffer."""
    if dim == 0 or math.prod(x.shape[:dim]) == 1:
        return as_flat(x)
    return torch.cat([part.reshape(-1) for part in dense(x).split(list(sizes), dim)])


def assemble(
    collect: Callable[[Sequence[int] | None], Tensor], shape: Sequence[int], dim: int, sizes: Sequence[int]
) -> Tensor:
    """Collect the ranks' parts, joined along `dim`.

    Args:
        collect: runs a primitive into a buffer of the given shape; None: flat.
        shape: that of any part, its size along `dim` ignored.
        dim: the dimension to join along.
        sizes: each part's size along it.
    """
    lead, tail = tuple(shape[:dim]), tuple(shape[dim + 1 :])
    if dim == 0 or math.prod(lead) == 1:
        return collect((*lead, sum(sizes), *tail))
    parts = collect(None).split(counts(shape, dim, sizes))
    return torch.cat([part.view(*lead, n, *tail) for part, n in zip(parts, sizes, strict=True)], dim)
