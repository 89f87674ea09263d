"""Point-to-point maps: a partial permutation of the ranks, and the ring shift."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradmesh.ops import wire
from gradmesh.ops.base import LinearOp, SameShape
from gradmesh.types import V

__all__ = ["Permute", "Shift"]


class _Route(SameShape):
    """Each rank sends to one rank at most and receives from one rank at most; zeros where nothing arrives."""

    src, dst = V, V

    def ends(self) -> tuple[int | None, int | None]:
        """The rank this one sends to and the rank it receives from."""
        raise NotImplementedError

    def transfer(self, x: Tensor) -> Tensor:
        """Send and receive."""
        got = wire.relay(x, self.axis, *self.ends())
        return torch.zeros(x.shape, dtype=x.dtype, device=x.device) if got is None else got


@dataclass(frozen=True)
class Permute(_Route):
    """V -> V: for each pair, the target gets the source's tensor; zeros where nothing arrives.

    Attributes:
        pairs: (source, target) ranks of the axis, no source and no target twice.
    """

    pairs: tuple[tuple[int, int], ...]

    verb = "permute"

    def ends(self) -> tuple[int | None, int | None]:
        """The partners among the pairs."""
        to = dict(self.pairs).get(self.axis.rank)
        return to, {target: source for source, target in self.pairs}.get(self.axis.rank)

    @property
    def adjoint(self) -> LinearOp:
        """Every pair turned round."""
        return Permute(self.axis, tuple((target, source) for source, target in self.pairs), **self.swapped)


@dataclass(frozen=True)
class Shift(_Route):
    """V -> V: rank r's tensor to rank r + offset.

    Attributes:
        offset: how many ranks further; negative: back.
        wrap: whether the last rank's neighbour is the first; else zeros enter at the open end.
    """

    offset: int
    wrap: bool

    verb = "shift"

    def ends(self) -> tuple[int | None, int | None]:
        """The ranks `offset` further and back, if they are there."""
        return self._at(self.axis.rank + self.offset), self._at(self.axis.rank - self.offset)

    def _at(self, rank: int) -> int | None:
        if self.wrap:
            return rank % self.axis.size
        return rank if 0 <= rank < self.axis.size else None

    @property
    def adjoint(self) -> LinearOp:
        """The shift back."""
        return Shift(self.axis, -self.offset, self.wrap, **self.swapped)
