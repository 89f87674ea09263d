"""Point-to-point maps: a partial permutation of the ranks, and the ring shift."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from gradmesh.ops.base import LinearOp, shifted
from gradmesh.ops.row import Example, Row, uneven
from gradmesh.ops.sizes import Sizes
from gradmesh.ops.transport import Axis, Transport
from gradmesh.types import V


@dataclass(frozen=True)
class Extents:
    """Sizes that differ from rank to rank along one dimension."""

    dim: int  # the tensor dimension
    before: Sizes  # each rank's size of the operand along it
    after: Sizes  # each rank's size of the result; zeros where nothing arrives


@dataclass(frozen=True)
class Route(LinearOp):
    """Each rank sends to one rank at most and receives from one rank at most; zeros where nothing arrives."""

    extents: Extents | None = None  # where the ranks' sizes differ; None: all operands have one shape

    src, dst = V, V

    def params(self) -> dict[str, object]:
        """The verb's arguments. The output size on ranks that receive nothing is only known in backward."""
        params = super().params()
        there = self.extents
        del params["extents"]
        if there is None:
            return params
        params |= {"dim": there.dim, "sizes": there.before}
        return (
            params if self.along(there.dim, there.before) == self else {**params, "sizes_after": there.after}
        )

    @abc.abstractmethod
    def source_of(self, rank: int) -> int | None:
        """The rank that this rank receives from."""

    @abc.abstractmethod
    def inverse(self) -> Self:
        """The inverse route."""

    def transfer(self, x: Tensor, wire: Transport) -> Tensor:
        """Send and receive."""
        shape, me = self.out_shape(x.shape), self.axis.rank
        targets = [rank for rank in range(self.axis.size) if self.source_of(rank) == me]
        got = wire.relay(x, targets[0] if targets else None, self.source_of(me), shape)
        return torch.zeros(shape, dtype=x.dtype, device=x.device) if got is None else got

    def out_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The operand's shape, with what comes from the source where sizes differ."""
        if self.extents is None:
            return tuple(shape)
        dim, before, after = self.extents.dim, self.extents.before, self.extents.after
        before.of_part(self, dim, shape[dim])
        return shifted(shape, dim, after[self.axis.rank])

    def ragged_dims(self) -> tuple[int, ...]:
        """`extents.dim`, if sizes differ between ranks."""
        return () if self.extents is None else (self.extents.dim,)

    def along(self, dim: int, sizes: Sizes) -> Self:
        """The same op for operands of these sizes along `dim`; empty results where nothing arrives."""
        sources = [self.source_of(rank) for rank in range(self.axis.size)]
        after = Sizes(tuple(0 if source is None else sizes[source] for source in sources))
        return replace(self, extents=Extents(dim, sizes, after))

    def batched(self) -> Self:
        """The same op one dimension further back."""
        if self.extents is None:
            return self
        return replace(self, extents=replace(self.extents, dim=self.extents.dim + 1))

    @property
    def adjoint(self) -> LinearOp:
        """The inverse route, with sizes before and after swapped."""
        there = self.extents
        back = None if there is None else Extents(there.dim, there.after, there.before)
        return replace(self.inverse(), extents=back, **self.swapped)


@dataclass(frozen=True)
class Permute(Route):
    """V -> V: for each pair, the target gets the source's tensor; zeros where nothing arrives."""

    # (source, target) ranks of the axis, no source and no target twice
    pairs: tuple[tuple[int, int], ...] = ()

    verb = "permute"

    def source_of(self, rank: int) -> int | None:
        """The source of the rank's pair."""
        return next((source for source, target in self.pairs if target == rank), None)

    def inverse(self) -> Self:
        """Every pair reversed."""
        return replace(self, pairs=tuple((target, source) for source, target in self.pairs))


@dataclass(frozen=True)
class Shift(Route):
    """V -> V: rank r's tensor to rank r + offset."""

    offset: int = 1  # how many ranks further; negative: back
    wrap: bool = True  # whether the last rank's neighbour is the first; else zeros enter at the open end

    verb = "shift"

    def source_of(self, rank: int) -> int | None:
        """The rank `offset` before, if it exists."""
        source, size = rank - self.offset, int(self.axis.size)
        if self.wrap:
            return source % size
        return source if 0 <= source < size else None

    def inverse(self) -> Self:
        """The shift back."""
        return replace(self, offset=-self.offset)


def _shifts(axis: Axis) -> list[Example]:
    sizes = uneven(axis)
    own = sizes[axis.rank]
    return [
        (Shift(axis, offset=1, wrap=True), (2, 3)),
        (Shift(axis, offset=-2, wrap=True), (3,)),
        (Shift(axis, offset=1, wrap=False), (2, 3)),
        (Shift(axis, offset=5, wrap=False), ()),
        (Shift(axis, offset=1, wrap=False).along(1, sizes), (2, own)),
        (Shift(axis, offset=-1).along(0, sizes), (own, 2)),
    ]


def _permutes(axis: Axis) -> list[Example]:
    sizes, last = uneven(axis), axis.size - 1
    return [
        (Permute(axis, pairs=((0, last),)), (2, 3)),
        (Permute(axis, pairs=tuple((r, last - r) for r in range(axis.size))), (3,)),
        (Permute(axis), (3,)),
        (Permute(axis, pairs=((0, last),)).along(0, sizes), (sizes[axis.rank], 2)),
    ]


ROWS = (
    Row("shift", "tensor of the rank `offset` before", _shifts, "the other way"),
    Row("permute", "tensors between pairs of ranks, zeros elsewhere", _permutes, "pairs turned round"),
)
