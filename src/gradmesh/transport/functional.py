"""The transport for `gradmesh.reorderable()`: functional collectives, which a compiler may reorder and bucket.

It serves ops that are one collective with the same arguments on every rank. A compiler sees one rank's program only:
if the programs of the ranks differ, it may order their collectives differently.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from gradmesh._torch import functional
from gradmesh.transport.base import Transport
from gradmesh.transport.local import TracedLocalTransport
from gradmesh.transport.packing import dense

__all__ = ["Functional"]


class Functional(Transport):
    """An axis inside a compiled program."""

    def exchange(
        self,
        flat: Tensor,
        send: Sequence[int],
        receive: Sequence[int],
        shape: Sequence[int] | None = None,
        *,
        even: bool = False,  # noqa: ARG002
    ) -> Tensor:
        """A functional all-to-all."""
        got = functional("all_to_all_single", self.axis.group, dense(flat), list(receive), list(send))
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
        """A functional reduce-scatter where all parts are equal."""
        if not even:
            return super().sum_and_scatter(flat, counts, shape)
        return functional("reduce_scatter_tensor", self.axis.group, flat, "sum", self.axis.size).view(shape)

    def sum(self, x: Tensor) -> Tensor:
        """A functional all-reduce."""
        return functional("all_reduce", self.axis.group, dense(x), "sum")

    def copy_from(self, x: Tensor, root: int) -> Tensor:
        """A functional broadcast."""
        return functional("broadcast", self.axis.group, dense(x), root)

    room, copy = TracedLocalTransport.room, TracedLocalTransport.copy
