"""The sum over the ranks in its two conventions, and replicate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from gradmesh.ops.base import LinearOp, Op, SameShape
from gradmesh.ops.row import Row, on_axis
from gradmesh.ops.transport import Transport
from gradmesh.types import I, P, R


class AllReduce(SameShape):
    """P -> R: the sum; each rank uses it differently, so its gradients are summed too."""

    verb = "all_reduce"
    chosen = ("dst",)
    src, dst = P, R
    sums = True
    symmetric = True

    def transfer(self, x: Tensor, wire: Transport) -> Tensor:
        """Sum over the ranks."""
        return wire.sum(x)

    @property
    def adjoint(self) -> LinearOp:
        """Itself."""
        return AllReduce(self.axis, **self.swapped)


class AllReduceInvariant(AllReduce):
    """P -> I: the sum; every rank repeats the same work on it, so its gradient is whole already."""

    dst = I

    @property
    def adjoint(self) -> LinearOp:
        """The gradient, unchanged."""
        return Replicate(self.axis, **self.swapped)


class Replicate(SameShape):
    """I -> R: the same value; from here on each rank uses it differently."""

    verb = "replicate"
    sends = False
    src, dst = I, R

    def transfer(self, x: Tensor, wire: Transport) -> Tensor:
        """Copy."""
        return wire.copy(x)

    @property
    def adjoint(self) -> LinearOp:
        """Sum the ranks' gradients."""
        return AllReduceInvariant(self.axis, **self.swapped)


ROWS = (
    Row("all_reduce(dst=R)", "sum", on_axis(AllReduce)),
    Row("all_reduce(dst=I)", "sum", on_axis(AllReduceInvariant)),
    Row("replicate", "identity", on_axis(Replicate)),
)


@dataclass(frozen=True)
class Extremum(Op):
    """The largest or smallest value over the ranks, NaN where any rank has one."""

    largest: bool  # the largest, else the smallest

    verb = "all_reduce"

    def params(self) -> dict[str, object]:
        """The reduction's name."""
        params = super().params()
        params["op"] = "max" if params.pop("largest") else "min"
        return params

    def transfer(self, x: Tensor, wire: Transport) -> Tensor:
        """Reduce with torch's amax or amin, because backends may drop a NaN depending on the order."""
        return wire.fold(x, lambda parts: parts.amax(0) if self.largest else parts.amin(0))

    def out_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The operand's shape."""
        return tuple(shape)
