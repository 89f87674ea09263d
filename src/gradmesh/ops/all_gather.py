"""all_gather into a replicated value, and its adjoint reduce_scatter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from gradmesh.ops.base import LinearOp, shifted
from gradmesh.types import P, R, V
from gradmesh.wire import motions as wire

__all__ = ["AllGather", "ReduceScatter", "Split"]


@dataclass(frozen=True)
class Split(LinearOp):
    """An op that cuts or joins along a tensor dimension.

    Attributes:
        dim: the tensor dimension, counted from 0.
        sizes: each rank's size along it; None: the same on every rank.
    """

    dim: int
    sizes: tuple[int, ...] | None = None

    def batched(self) -> Split:
        """The same op one dimension further back."""
        return replace(self, dim=self.dim + 1)

    def loose(self) -> tuple[int, ...]:
        """The sizes along `dim`, where each rank's is told."""
        return () if self.sizes is None else (self.dim,)

    def parts(self, total: int) -> Sequence[int]:
        """Each rank's size along `dim` of a tensor that is whole; refuses a total that does not fit."""
        if self.sizes is None:
            if total % self.axis.size:
                self.fail(
                    f"dim {self.dim} cannot be split equally",
                    expected=f"a size that {self.axis.size} ranks divide",
                    got=f"size {total}",
                    remedy="pass sizes= with one size for each rank",
                )
            return (total // self.axis.size,) * self.axis.size
        if sum(self.sizes) != total:
            self.fail(
                f"the sizes do not add up to dim {self.dim}",
                expected=f"sizes with the sum {total}",
                got=f"sizes={self.sizes} with the sum {sum(self.sizes)}",
                remedy="give each rank's size along dim",
            )
        return self.sizes

    def pieces(self, own: int) -> Sequence[int]:
        """Each rank's size along `dim`, from the own size of a tensor that is one part."""
        if self.sizes is None:
            return (own,) * self.axis.size
        if self.sizes[self.axis.rank] != own:
            self.fail(
                f"dim {self.dim} is not what sizes says for this rank",
                expected=f"size {self.sizes[self.axis.rank]}, from sizes={self.sizes}",
                got=f"size {own}",
                remedy='pass the true sizes, or sizes="auto" to have them exchanged',
            )
        return self.sizes


class Join(Split):
    """Concatenate the ranks' parts along `dim`, on every rank."""

    def transfer(self, x: Tensor) -> Tensor:
        """Gather, then put the parts side by side along `dim`."""
        sizes = self.pieces(x.shape[self.dim])
        flat = wire.pack(x, self.dim, (x.shape[self.dim],))
        counts = wire.counts(x.shape, self.dim, sizes)
        return wire.assemble(
            lambda shape: wire.all_gather(flat, self.axis, counts, shape, even=self.sizes is None),
            x.shape,
            self.dim,
            sizes,
        )

    def out_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The sum of the sizes along `dim`."""
        return shifted(shape, self.dim, sum(self.pieces(shape[self.dim])))


class AllGather(Join):
    """V -> R: concatenate along `dim`; each rank uses the result differently."""

    verb = "all_gather"
    src, dst = V, R

    @property
    def adjoint(self) -> ReduceScatter:
        """Sum the ranks' gradients and keep the own slice."""
        return ReduceScatter(self.axis, self.dim, self.sizes, **self.swapped)


class ReduceScatter(Split):
    """P -> V: sum over the ranks and keep the own slice along `dim`."""

    verb = "reduce_scatter"
    src, dst = P, V
    sums = True

    def transfer(self, x: Tensor) -> Tensor:
        """Send each rank its slice and add what comes."""
        sizes = self.parts(x.shape[self.dim])
        flat = wire.pack(x, self.dim, sizes)
        counts = wire.counts(x.shape, self.dim, sizes)
        even = self.sizes is None
        return wire.reduce_scatter(flat, self.axis, counts, self.out_shape(x.shape), even=even)

    def out_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The own size along `dim`."""
        return shifted(shape, self.dim, self.parts(shape[self.dim])[self.axis.rank])

    @property
    def adjoint(self) -> AllGather:
        """Concatenate the ranks' gradients."""
        return AllGather(self.axis, self.dim, self.sizes, **self.swapped)
