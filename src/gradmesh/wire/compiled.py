"""The carrier of a program that is being compiled.

A compiler sees one rank's program. It drops a collective whose result that rank does not use, while the others still
run it, and moves those that it knows. Even motions are functional collectives, which it may bucket and move. Where
some ranks receive nothing (a ragged exchange, a sum at a root) the motion is an opaque op with an ordered effect, which
it keeps and does not move.

Told sizes are not looked into here, so that a program is compiled once for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from gradmesh._torch import functional
from gradmesh.wire import opaque
from gradmesh.wire.alone import TracedAlone
from gradmesh.wire.carrier import Carrier
from gradmesh.wire.packing import CARRIED, dense

__all__ = ["Compiled"]


class Compiled(Carrier):
    """An axis, seen by a compiler."""

    def exchange(
        self,
        flat: Tensor,
        send: Sequence[int],
        receive: Sequence[int],
        shape: Sequence[int] | None = None,
        *,
        even: bool = False,
    ) -> Tensor:
        """A functional all-to-all where all parts are equal, else an opaque op."""
        given, group = dense(flat), self.axis.group
        if even:
            got = functional("all_to_all_single", group, given, list(receive), list(send))
        else:
            got = opaque.exchange(given, list(send), list(receive), group.group_name)
        return got if shape is None else got.view(shape)

    def gather(
        self, flat: Tensor, counts: Sequence[int], shape: Sequence[int] | None = None, *, even: bool = False
    ) -> Tensor:
        """A functional all-gather where all parts are equal."""
        if not even:
            return super().gather(flat, counts, shape)
        out = functional("all_gather_into_tensor", self.axis.group, flat, self.axis.size)
        return out if shape is None else out.view(shape)

    def sum_and_scatter(
        self, flat: Tensor, counts: Sequence[int], shape: Sequence[int], *, even: bool = False
    ) -> Tensor:
        """A functional reduce-scatter where all parts are equal and a backend can add."""
        if not even or flat.dtype not in CARRIED:
            return super().sum_and_scatter(flat, counts, shape)
        return functional("reduce_scatter_tensor", self.axis.group, flat, "sum", self.axis.size).view(shape)

    def sum(self, x: Tensor) -> Tensor:
        """A functional all-reduce."""
        if x.dtype not in CARRIED:
            return super().sum(x)
        return functional("all_reduce", self.axis.group, dense(x), "sum")

    def sum_at(self, x: Tensor, root: int) -> Tensor:
        """An opaque op: only one rank has a result."""
        if x.dtype not in CARRIED:
            return super().sum_at(x, root)
        total = opaque.reduce(dense(x), root, self.axis.group.group_name)
        result: Tensor = total if self.axis.rank == root else total.zero_()
        return result

    def copy_from(self, x: Tensor, root: int) -> Tensor:
        """A functional broadcast."""
        return functional("broadcast", self.axis.group, dense(x), root)

    room, copy = TracedAlone.room, TracedAlone.copy
