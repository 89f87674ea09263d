"""The elementwise extremum over the ranks. It is not linear; `gradmesh.reductions` gives it its derivative."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from gradmesh.ops.base import Op
from gradmesh.transport import Transport

__all__ = ["Extremum"]


@dataclass(frozen=True)
class Extremum(Op):
    """The largest or smallest value over the ranks, NaN where any rank has one.

    Attributes:
        largest: the largest, else the smallest.
    """

    largest: bool

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
