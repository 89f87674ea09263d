"""The transport for any process group of torch.distributed: Gloo, NCCL, MPI, and whatever else is registered.

These backends do not compare the ranks' calls: operands of unexpected sizes abort the process or give garbage, and
different collectives hang. So for CPU tensors a checked call first exchanges eight bytes; where these differ, the ranks
exchange descriptions of their calls. Tensors on other devices are not compared: the exchange would have to wait for the
device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from gradmesh.backends.call_check import FLAGS
from gradmesh.transport import messages
from gradmesh.transport.base import Transport
from gradmesh.transport.call_checks import refusal_text
from gradmesh.transport.count_checks import agreed, balance, signed
from gradmesh.transport.failed_ranks import failed_ranks_named
from gradmesh.transport.packing import CARRIED, flat_memory, with_memory

__all__ = ["TorchGroup", "exchange_memory"]

# torch 2.13 renamed both; the old names only warn there.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def exchange_memory(
    out: Tensor, flat: Tensor, send: Sequence[int], receive: Sequence[int], group: dist.ProcessGroup
) -> None:
    """Exchange between dense buffers of any dtype; the counts are elements of it."""
    width = 1 if flat.dtype in CARRIED else flat.dtype.itemsize
    dist.all_to_all_single(
        flat_memory(out),
        flat_memory(with_memory(flat)),
        [n * width for n in receive],
        [n * width for n in send],
        group=group,
    )


class TorchGroup(Transport):
    """An axis with a group of torch.distributed."""

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
        self._agree(send, receive)
        out = self.room(flat, [sum(receive)] if shape is None else shape)
        if even:
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
        self._agree()
        out = self.room(flat, [sum(counts)] if shape is None else shape)
        _all_gather(flat_memory(out), flat_memory(with_memory(flat)), group=self.axis.group)
        return out

    def sum_and_scatter(
        self, flat: Tensor, counts: Sequence[int], shape: Sequence[int], *, even: bool = False
    ) -> Tensor:
        """`reduce_scatter_single` where all lengths are equal and the backend can add."""
        if flat.dtype not in CARRIED or (not even and len(set(counts)) > 1):
            return super().sum_and_scatter(flat, counts, shape, even=even)
        self._agree()
        out = self.room(flat, shape)
        _reduce_scatter(flat_memory(out), with_memory(flat), group=self.axis.group)
        return out

    def sum(self, x: Tensor) -> Tensor:
        """`all_reduce`, of a dense copy: Gloo adds tensors in the order of their memory."""
        if x.dtype not in CARRIED:
            return super().sum(x)
        self._agree()
        out = self.copy(x)
        dist.all_reduce(out, group=self.axis.group)
        return out

    def sum_at(self, x: Tensor, root: int) -> Tensor:
        """`reduce`."""
        if x.dtype not in CARRIED:
            return super().sum_at(x, root)
        self._agree()
        out = self.copy(x)
        dist.reduce(out, group_dst=root, group=self.axis.group)
        # Backends leave partial sums on the other ranks.
        return out if self.axis.rank == root else out.zero_()

    def copy_from(self, x: Tensor, root: int) -> Tensor:
        """`broadcast`."""
        self._agree()
        out = self.copy(x) if self.axis.rank == root else self.room(x, x.shape)
        dist.broadcast(flat_memory(out), group_src=root, group=self.axis.group)
        return out

    def post(self, x: Tensor, peer: int, greeting: str) -> None:
        """`isend`."""
        messages.post(self.copy(x), self.axis, peer, greeting)

    def fetch(self, out: Tensor, peer: int, greeting: str) -> str | None:
        """`recv`."""
        return messages.receive(out, self.axis, peer, greeting)

    def withdraw_message(self, peer: int, said: str) -> None:
        """Send a header without a message."""
        messages.withdraw(self.axis, peer, said)

    def pass_over(self, peer: int) -> None:
        """Have the next `recv` from that rank discard it."""
        messages.pass_over(self.axis, peer)

    # -- comparing

    def compare(self) -> None:
        """Compare the calls only."""
        self._agree()

    def _agree(self, send: Sequence[int] = (), receive: Sequence[int] = ()) -> None:
        """Compare the ranks' calls and counts, before the first primitive of the call."""
        call_check = self.take_check()
        if call_check is None:
            return
        bits = call_check.digest & ~FLAGS
        head = signed(bits + balance(self.axis.rank, send, receive)) | call_check.flags
        heads = self._heads(head)
        if not agreed(heads, bits):
            raise call_check.refusal(self._words(call_check.said()))
        if len({head & FLAGS for head in heads}) > 1:
            call_check.peer_flags = [head & FLAGS for head in heads]

    def withdraw(self, error: Exception) -> None:
        """Take part in the comparison with a digest that matches no other."""
        call_check = self.take_check()
        if call_check is None:
            return
        own = ~call_check.digest & ~FLAGS
        with contextlib.suppress(RuntimeError):  # the caller raises its own error
            if not agreed(self._heads(own), own):
                self._words(refusal_text(error))

    def _heads(self, own: int) -> list[int]:
        numbers = torch.empty(self.axis.size, dtype=torch.int64, device="cpu")
        with failed_ranks_named(self.axis):
            _all_gather(numbers, torch.tensor([own], device="cpu"), group=self.axis.group)
        found: list[int] = numbers.tolist()
        return found

    def _words(self, own: str) -> list[str]:
        words = [""] * self.axis.size
        dist.all_gather_object(words, own, group=self.axis.group)
        return words
