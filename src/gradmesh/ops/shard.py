"""This rank's slice of a replicated value, with its adjoints: all_gather(dst=I) and the padded slice."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradmesh.ops.all_gather import Join, Split, parts, wholes
from gradmesh.ops.base import LinearOp, shifted
from gradmesh.ops.row import Row
from gradmesh.ops.transport import Transport
from gradmesh.types import I, P, R, V


class _Slice(Split):
    verb = "shard"
    chosen = ("src",)
    sends = False

    def transfer(self, x: Tensor, wire: Transport) -> Tensor:
        """Copy this rank's slice."""
        sizes, rank = self.parts(x.shape), self.axis.rank
        return wire.copy(x.narrow(self.dim, sum(sizes[:rank]), sizes[rank]))

    def out_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """This rank's size along `dim`."""
        return shifted(shape, self.dim, self.parts(shape)[self.axis.rank])


class AllGatherInvariant(Join):
    """V -> I: concatenate along `dim`; every rank repeats the same work on the result."""

    verb = "all_gather"
    chosen = ("dst",)
    src, dst = V, I

    @property
    def adjoint(self) -> LinearOp:
        """This rank's slice: every rank has the full gradient."""
        return Shard(self.axis, self.dim, self.sizes, **self.swapped)


class Shard(_Slice):
    """I -> V: this rank's slice of a value on which every rank did the same work."""

    src, dst = I, V

    @property
    def adjoint(self) -> LinearOp:
        """Concatenate the slices' gradients."""
        return AllGatherInvariant(self.axis, self.dim, self.sizes, **self.swapped)


class ShardReplicated(_Slice):
    """R -> V: this rank's slice of a value that each rank uses differently."""

    src, dst = R, V

    @property
    def adjoint(self) -> LinearOp:
        """The slice's gradient at its position, zeros elsewhere: this rank's term of a pending sum."""
        return Pad(self.axis, self.dim, self.sizes, **self.swapped)


class Pad(Split):
    """V -> P: this rank's part at its position, zeros elsewhere. The adjoint of `shard(src=R)`."""

    verb = "shard"
    public = False
    src, dst = V, P
    sends = False

    def transfer(self, x: Tensor, wire: Transport) -> Tensor:  # noqa: ARG002
        """Copy to this rank's position."""
        sizes = self.pieces(x.shape)
        out = torch.zeros(self.out_shape(x.shape), dtype=x.dtype, device=x.device)
        out.narrow(self.dim, sum(sizes[: self.axis.rank]), x.shape[self.dim]).copy_(x)
        return out

    def out_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The sum of the sizes along `dim`."""
        return shifted(shape, self.dim, sum(self.pieces(shape)))

    @property
    def adjoint(self) -> LinearOp:
        """This rank's slice."""
        return ShardReplicated(self.axis, self.dim, self.sizes, **self.swapped)


ROWS = (
    Row("all_gather(dst=I)", "concatenate along dim (0-d: stack)", parts(AllGatherInvariant)),
    Row("shard(src=I)", "own slice", wholes(Shard)),
    Row("shard(src=R)", "own slice", wholes(ShardReplicated)),
    Row("zero-padded own slice", "own slice in its place, zeros elsewhere", parts(Pad), public=False),
)
