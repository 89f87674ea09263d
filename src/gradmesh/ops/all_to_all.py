"""all_to_all: each rank splits its tensor, sends a part to every rank and joins what it receives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradmesh.ops.base import LinearOp, shifted
from gradmesh.types import V
from gradmesh.wire import motions as wire

__all__ = ["AllToAll"]


@dataclass(frozen=True)
class AllToAll(LinearOp):
    """V -> V: split along `split_dim`, exchange, concatenate along `concat_dim`.

    Attributes:
        split_dim: the dimension that is cut.
        concat_dim: the dimension along which the received parts are joined.
        split_sizes: the size of the part for each rank; None: equal parts.
        concat_sizes: each received part's size along `concat_dim`; None: what an equal split gives.
    """

    split_dim: int
    concat_dim: int
    split_sizes: tuple[int, ...] | None = None
    concat_sizes: tuple[int, ...] | None = None

    verb = "all_to_all"
    src, dst = V, V
    per_rank = ("split_sizes", "concat_sizes")

    def loose(self) -> tuple[int, ...]:
        """What is cut, where the cuts are told, and what is joined, where that differs."""
        cut = () if self.split_sizes is None or self.split_dim != self.concat_dim else (self.split_dim,)
        return cut if self.concat_sizes is None else (*cut, self.concat_dim)

    def _split(self, shape: Sequence[int]) -> tuple[int, ...]:
        size, world = shape[self.split_dim], self.axis.size
        if self.split_sizes is None and size % world:
            self.fail(
                f"dim {self.split_dim} cannot be split equally",
                expected=f"a size that {world} ranks divide",
                got=f"size {size}",
                remedy="pass split_sizes= and concat_sizes=",
            )
        sizes = self.split_sizes or (size // world,) * world
        if sum(sizes) != size:
            self.fail(
                f"split_sizes do not add up to dim {self.split_dim}",
                expected=f"sizes with the sum {size}",
                got=f"split_sizes={sizes} with the sum {sum(sizes)}",
                remedy="give the size of the part for each rank",
            )
        return sizes

    def _received(self, shape: Sequence[int]) -> list[tuple[int, ...]]:
        """The shape of the part that comes from each rank."""
        mine = self._split(shape)[self.axis.rank]
        if self.split_dim == self.concat_dim:
            return [shifted(shape, self.concat_dim, n) for n in self.concat_sizes or (mine,) * self.axis.size]
        own = shape[self.concat_dim]
        sizes = self.concat_sizes or (own,) * self.axis.size
        if sizes[self.axis.rank] != own:
            self.fail(
                f"dim {self.concat_dim} is not what concat_sizes says for this rank",
                expected=f"size {sizes[self.axis.rank]}, from concat_sizes={sizes}",
                got=f"size {own}",
                remedy="pass each rank's size along concat_dim",
            )
        return [shifted(shifted(shape, self.split_dim, mine), self.concat_dim, n) for n in sizes]

    def transfer(self, x: Tensor) -> Tensor:
        """Pack a part for each rank, exchange, join."""
        sizes = self._split(x.shape)
        shapes = self._received(x.shape)
        receive = [torch.Size(shape).numel() for shape in shapes]
        flat = wire.pack(x, self.split_dim, sizes)
        send = wire.counts(x.shape, self.split_dim, sizes)
        even = self.split_sizes is None and self.concat_sizes is None
        return wire.assemble(
            lambda shape: wire.exchange(flat, send, receive, self.axis, shape, even=even),
            shapes[0],
            self.concat_dim,
            [shape[self.concat_dim] for shape in shapes],
        )

    def out_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The own part's size along `split_dim`, the received parts' sum along `concat_dim`."""
        parts = self._received(shape)
        return shifted(parts[0], self.concat_dim, sum(part[self.concat_dim] for part in parts))

    def batched(self) -> AllToAll:
        """The same op one dimension further back."""
        return replace(self, split_dim=self.split_dim + 1, concat_dim=self.concat_dim + 1)

    @property
    def adjoint(self) -> LinearOp:
        """The way back: splits and dimensions swapped."""
        return AllToAll(
            self.axis, self.concat_dim, self.split_dim, self.concat_sizes, self.split_sizes, **self.swapped
        )
