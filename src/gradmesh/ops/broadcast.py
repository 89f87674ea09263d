"""broadcast in its two conventions, reduce, and keep at root."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradmesh.ops.base import LinearOp, SameShape
from gradmesh.ops.row import Examples, Row
from gradmesh.ops.transport import Transport
from gradmesh.types import I, P, R, V


@dataclass(frozen=True)
class Rooted(SameShape):
    """An op with a root, which is a rank of the axis."""

    root: int


class _FromRoot(Rooted):
    verb = "broadcast"
    chosen = ("dst",)
    rooted = True
    symmetric = True

    def transfer(self, x: Tensor, wire: Transport) -> Tensor:
        """Copy from the root."""
        return wire.copy_from(x, self.root)


class Broadcast(_FromRoot):
    """V at root -> R: the root's value on every rank; each rank uses it differently."""

    src, dst = V, R

    @property
    def adjoint(self) -> LinearOp:
        """Sum the ranks' gradients at the root."""
        return Reduce(self.axis, self.root, **self.swapped)


class Reduce(Rooted):
    """P -> V at root: the sum at the root, zeros elsewhere."""

    verb = "reduce"
    src, dst = P, V
    sums = True

    def transfer(self, x: Tensor, wire: Transport) -> Tensor:
        """Sum at the root."""
        return wire.sum_at(x, self.root)

    @property
    def adjoint(self) -> LinearOp:
        """The root's gradient on every rank."""
        return Broadcast(self.axis, self.root, **self.swapped)


class BroadcastInvariant(_FromRoot):
    """V at root -> I: the root's value on every rank; every rank repeats the same work on it."""

    src, dst = V, I

    @property
    def adjoint(self) -> LinearOp:
        """Every rank has the full gradient: keep the root's."""
        return KeepAtRoot(self.axis, self.root, **self.swapped)


class KeepAtRoot(Rooted):
    """I -> V at root: the value at the root, zeros elsewhere. The adjoint of `broadcast(dst=I)`."""

    verb = "broadcast"
    public = False
    src, dst = I, V
    sends = False

    def transfer(self, x: Tensor, wire: Transport) -> Tensor:
        """Copy at the root."""
        if self.axis.rank == self.root:
            return wire.copy(x)
        return torch.zeros(x.shape, dtype=x.dtype, device=x.device)

    @property
    def adjoint(self) -> LinearOp:
        """The root's gradient on every rank, counted once."""
        return BroadcastInvariant(self.axis, self.root, **self.swapped)


def _rooted(op: type[Rooted]) -> Examples:
    """Examples with the first and the last rank as root."""
    return lambda axis: [(op(axis, axis.size - 1), (2, 3)), (op(axis, 0), ())]


ROWS = (
    Row("broadcast(dst=R)", "copy from root", _rooted(Broadcast)),
    Row("broadcast(dst=I)", "copy from root", _rooted(BroadcastInvariant)),
    Row("reduce", "sum at root, zeros elsewhere", _rooted(Reduce)),
    Row("keep at root", "keep at root, zero elsewhere", _rooted(KeepAtRoot), public=False),
)
