"""Point-to-point maps: a partial permutation of the ranks, and the ring shift."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from gradmesh.ops.base import LinearOp, shifted
from gradmesh.types import V
from gradmesh.wire import motions as wire

__all__ = ["Extents", "Permute", "Shift"]


@dataclass(frozen=True)
class Extents:
    """Sizes that differ from rank to rank along one dimension.

    Attributes:
        dim: the tensor dimension.
        before: each rank's size of the operand along it.
        after: each rank's size of the result. Where nothing arrives, that many zeros.
    """

    dim: int
    before: tuple[int, ...]
    after: tuple[int, ...]


@dataclass(frozen=True)
class Route(LinearOp):
    """Each rank sends to one rank at most and receives from one rank at most; zeros where nothing arrives.

    Attributes:
        extents: where the ranks' sizes differ; None: all operands have one shape.
    """

    extents: Extents | None = None

    src, dst = V, V

    @abc.abstractmethod
    def source_of(self, rank: int) -> int | None:
        """The rank that this rank receives from."""

    @abc.abstractmethod
    def turned(self) -> Self:
        """The way back, for operands of one shape and the same precision."""

    def transfer(self, x: Tensor) -> Tensor:
        """Send and receive."""
        shape, me = self.out_shape(x.shape), self.axis.rank
        targets = [rank for rank in range(self.axis.size) if self.source_of(rank) == me]
        got = wire.relay(x, self.axis, targets[0] if targets else None, self.source_of(me), shape)
        return torch.zeros(shape, dtype=x.dtype, device=x.device) if got is None else got

    def out_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The operand's shape, with what comes from the source where sizes differ."""
        if self.extents is None:
            return tuple(shape)
        dim, before, after = self.extents.dim, self.extents.before, self.extents.after
        if shape[dim] != before[self.axis.rank]:
            self.fail(
                f"dim {dim} is not what sizes says for this rank",
                expected=f"size {before[self.axis.rank]}, from sizes={before}",
                got=f"size {shape[dim]}",
                remedy='pass the true sizes, or sizes="auto" to have them exchanged',
            )
        return shifted(shape, dim, after[self.axis.rank])

    def loose(self) -> tuple[int, ...]:
        """The dimension along which sizes are told."""
        return () if self.extents is None else (self.extents.dim,)

    def along(self, dim: int, sizes: tuple[int, ...]) -> Self:
        """The same op for operands of these sizes along `dim`; a rank to which nothing comes gets nothing."""
        sources = [self.source_of(rank) for rank in range(self.axis.size)]
        after = tuple(0 if source is None else sizes[source] for source in sources)
        return replace(self, extents=Extents(dim, sizes, after))

    def batched(self) -> Self:
        """The same op one dimension further back."""
        if self.extents is None:
            return self
        return replace(self, extents=replace(self.extents, dim=self.extents.dim + 1))

    @property
    def adjoint(self) -> LinearOp:
        """The way back; sizes before and after change places."""
        there = self.extents
        back = None if there is None else Extents(there.dim, there.after, there.before)
        return replace(self.turned(), extents=back, **self.swapped)


@dataclass(frozen=True)
class Permute(Route):
    """V -> V: for each pair, the target gets the source's tensor; zeros where nothing arrives.

    Attributes:
        pairs: (source, target) ranks of the axis, no source and no target twice.
    """

    pairs: tuple[tuple[int, int], ...] = ()

    verb = "permute"

    def source_of(self, rank: int) -> int | None:
        """The partner in the pairs."""
        return next((source for source, target in self.pairs if target == rank), None)

    def turned(self) -> Self:
        """Every pair turned round."""
        return replace(self, pairs=tuple((target, source) for source, target in self.pairs))


@dataclass(frozen=True)
class Shift(Route):
    """V -> V: rank r's tensor to rank r + offset.

    Attributes:
        offset: how many ranks further; negative: back.
        wrap: whether the last rank's neighbour is the first; else zeros enter at the open end.
    """

    offset: int = 1
    wrap: bool = True

    verb = "shift"

    def source_of(self, rank: int) -> int | None:
        """The rank `offset` before, if it is there."""
        source = rank - self.offset
        if self.wrap:
            return source % self.axis.size
        return source if 0 <= source < self.axis.size else None

    def turned(self) -> Self:
        """The shift back."""
        return replace(self, offset=-self.offset)
