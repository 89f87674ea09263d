"""The transport for groups of gradmesh's own backends, which share memory.

Their groups are called directly, because torch.distributed's functions take a tenth of a small call. The call check is
sent with the data at no cost. A rank that fails before it has sent notifies the others.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradmesh.axis import Axis
from gradmesh.backends.process_group import OwnGroup
from gradmesh.transport.base import Transport
from gradmesh.transport.call_checks import OpCallCheck, refusal_text
from gradmesh.transport.packing import dense, flattened
from gradmesh.transport.torch_group import TorchGroup

__all__ = ["OwnGroupTransport"]


class OwnGroupTransport(Transport):
    """An axis whose group is one of gradmesh's own."""

    def __init__(self, axis: Axis, call_check: OpCallCheck | None = None) -> None:
        super().__init__(axis, call_check)
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
        self.group.all_reduce_flat(flattened(out), flattened(dense(x)), self.take_check())
        return out

    def sum_at(self, x: Tensor, root: int) -> Tensor:
        """`reduce_flat`."""
        at_root = self.axis.rank == root
        out = self.room(x, x.shape) if at_root else torch.zeros(x.shape, dtype=x.dtype, device=x.device)
        self.group.reduce_flat(flattened(out), flattened(dense(x)), root, self.take_check())
        return out

    def copy_from(self, x: Tensor, root: int) -> Tensor:
        """`broadcast_flat`."""
        out = self.room(x, x.shape)
        self.group.broadcast_flat(flattened(out), flattened(dense(x)), root, self.take_check())
        return out

    def relay(self, x: Tensor, to: int | None, source: int | None, shape: Sequence[int]) -> Tensor | None:
        """`relay_flat`, which every rank calls."""
        one = flattened(dense(x))
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
