"""Changes of type that need no communication: relabellings, and keep at one rank."""

from __future__ import annotations

import torch
from torch import Tensor

from gradmesh.ops.base import LinearOp, SameShape
from gradmesh.ops.row import Row, on_axis
from gradmesh.ops.transport import Transport
from gradmesh.types import I, P, R, V


class _Relabel(SameShape):
    verb = "convert"
    chosen = ("src", "dst")
    sends = False

    def transfer(self, x: Tensor, wire: Transport) -> Tensor:
        """Copy."""
        return wire.copy(x)


class _KeepAtFirst(_Relabel):
    def transfer(self, x: Tensor, wire: Transport) -> Tensor:
        """Copy on rank 0; zeros on the others, so that the sum over the ranks is the value."""
        return wire.copy(x) if self.axis.rank == 0 else torch.zeros(x.shape, dtype=x.dtype, device=x.device)


class ReplicatedToPartial(_KeepAtFirst):
    """R -> P: the value on rank 0, zeros elsewhere."""

    src, dst = R, P

    @property
    def adjoint(self) -> LinearOp:
        """Itself."""
        return ReplicatedToPartial(self.axis, **self.swapped)


class ReplicatedToInvariant(_Relabel):
    """R -> I: the same value; from here on every rank repeats the same work."""

    src, dst = R, I

    @property
    def adjoint(self) -> LinearOp:
        """Every rank has the full gradient: keep rank 0's."""
        return InvariantToPartial(self.axis, **self.swapped)


class InvariantToPartial(_KeepAtFirst):
    """I -> P: the value on rank 0, zeros elsewhere."""

    src, dst = I, P

    @property
    def adjoint(self) -> LinearOp:
        """The same bits, as an invariant gradient."""
        return ReplicatedToInvariant(self.axis, **self.swapped)


class PartialFromVarying(_Relabel):
    """V -> P: each rank's own value, from here on read as a term of a sum."""

    src, dst = V, P

    @property
    def adjoint(self) -> LinearOp:
        """The gradient of the sum is the gradient of every term."""
        return VaryingFromReplicated(self.axis, **self.swapped)


class VaryingFromReplicated(_Relabel):
    """R -> V: a copy on each rank, from here on read as that rank's own value."""

    src, dst = R, V

    @property
    def adjoint(self) -> LinearOp:
        """The gradient of each copy is a term of the pending sum."""
        return PartialFromVarying(self.axis, **self.swapped)


ROWS = (
    Row("convert(src=R, dst=P)", "keep at one rank, zero elsewhere", on_axis(ReplicatedToPartial)),
    Row("convert(src=R, dst=I)", "identity", on_axis(ReplicatedToInvariant)),
    Row("convert(src=I, dst=P)", "keep at one rank, zero elsewhere", on_axis(InvariantToPartial)),
    Row("convert(src=V, dst=P)", "identity (a relabelling)", on_axis(PartialFromVarying)),
    Row("convert(src=R, dst=V)", "identity (a relabelling)", on_axis(VaryingFromReplicated)),
)
