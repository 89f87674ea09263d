"""Prefix sums over the ranks."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gradmesh.ops.base import LinearOp, SameShape
from gradmesh.ops.row import Examples, Row
from gradmesh.ops.transport import Transport
from gradmesh.types import V


@dataclass(frozen=True)
class Scan(SameShape):
    """V -> V: rank r gets the sum of the tensors of ranks 0 to r."""

    reverse: bool = False  # sum over ranks r to the last instead

    verb = "scan"
    src, dst = V, V
    sums = True

    def transfer(self, x: Tensor, wire: Transport) -> Tensor:
        """Add in log2(size) rounds, doubling the distance (Hillis and Steele, 1986)."""
        out, reach = wire.copy(x), 1
        while reach < self.axis.size:
            got = wire.relay(out, *self.neighbours(reach), x.shape)
            out = out if got is None else got.add_(out)
            reach *= 2
        return out

    def neighbours(self, reach: int) -> tuple[int | None, int | None]:
        """The ranks to send to and to receive from, `reach` away in the direction of the sum."""
        ahead, behind = self.axis.rank + reach, self.axis.rank - reach
        to, source = (behind, ahead) if self.reverse else (ahead, behind)
        inside = range(self.axis.size)
        return to if to in inside else None, source if source in inside else None

    @property
    def adjoint(self) -> LinearOp:
        """The scan in the other direction."""
        return type(self)(self.axis, not self.reverse, **self.swapped)


class Exscan(Scan):
    """V -> V: rank r gets the sum of the tensors of the ranks before it; zeros on the first."""

    verb = "exscan"

    def transfer(self, x: Tensor, wire: Transport) -> Tensor:
        """Shift by one rank, then scan."""
        got = wire.relay(x, *self.neighbours(1), x.shape)
        return super().transfer(x.new_zeros(x.shape) if got is None else got, wire)


def _both_ways(op: type[Scan]) -> Examples:
    return lambda axis: [(op(axis), (2, 3)), (op(axis, True), ())]


ROWS = (
    Row("scan", "sum over the ranks up to this one", _both_ways(Scan), "from the other end"),
    Row("exscan", "sum over the ranks before this one", _both_ways(Exscan), "from the other end"),
)
