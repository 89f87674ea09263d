"""gather to a root and scatter from it, each the adjoint of the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from gradmesh.ops.base import LinearOp, shifted
from gradmesh.types import V
from gradmesh.wire import motions as wire

__all__ = ["Gather", "Scatter"]


@dataclass(frozen=True)
class _AtRoot(LinearOp):
    """An op between parts on all ranks and the whole at the root.

    Attributes:
        dim: the tensor dimension along which the parts lie.
        root: the rank of the axis that has the whole.
        sizes: each rank's size along `dim`.
    """

    dim: int
    root: int
    sizes: tuple[int, ...]

    src, dst = V, V

    def batched(self) -> _AtRoot:
        """The same op one dimension further back."""
        return replace(self, dim=self.dim + 1)

    def loose(self) -> tuple[int, ...]:
        """The sizes along `dim`, as each rank's is told."""
        return (self.dim,)

    @property
    def whole(self) -> tuple[int, ...]:
        """The sizes at the root; on the other ranks nothing along `dim`."""
        return self.sizes if self.axis.rank == self.root else (0,) * self.axis.size

    @property
    def own(self) -> list[int]:
        """What this rank has for each rank, along `dim`: its part for the root."""
        return [self.sizes[self.axis.rank] if rank == self.root else 0 for rank in range(self.axis.size)]

    def refuse_unless(self, expected: int, got: int) -> None:
        """Refuse an operand of another size along `dim`."""
        if expected != got:
            self.fail(
                f"dim {self.dim} is not what sizes says for this rank",
                expected=f"size {expected}, from sizes={self.sizes} and root {self.root}",
                got=f"size {got}",
                remedy="pass each rank's size along dim; only the root of a scatter holds more than nothing",
            )


class Gather(_AtRoot):
    """V -> V at root: concatenate along `dim` at the root; empty along `dim` elsewhere."""

    verb = "gather"

    def transfer(self, x: Tensor) -> Tensor:
        """Send the own part to the root."""
        self.refuse_unless(self.sizes[self.axis.rank], x.shape[self.dim])
        send = wire.counts(x.shape, self.dim, self.own)
        receive = wire.counts(x.shape, self.dim, self.whole)
        flat = wire.pack(x, self.dim, self.own)
        return wire.assemble(
            lambda shape: wire.exchange(flat, send, receive, self.axis, shape), x.shape, self.dim, self.whole
        )

    def out_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The sum of the sizes at the root, 0 elsewhere."""
        self.refuse_unless(self.sizes[self.axis.rank], shape[self.dim])
        return shifted(shape, self.dim, sum(self.whole))

    @property
    def adjoint(self) -> LinearOp:
        """Each rank gets its part of the root's gradient."""
        return Scatter(self.axis, self.dim, self.root, self.sizes, **self.swapped)


class Scatter(_AtRoot):
    """V at root -> V: each rank gets its part along `dim`; the other ranks hand in a tensor empty along `dim`."""

    verb = "scatter"
    rooted = True

    def transfer(self, x: Tensor) -> Tensor:
        """Send each rank its part from the root."""
        self.refuse_unless(sum(self.whole), x.shape[self.dim])
        send = wire.counts(x.shape, self.dim, self.whole)
        receive = wire.counts(x.shape, self.dim, self.own)
        flat = wire.pack(x, self.dim, self.whole)
        return wire.exchange(flat, send, receive, self.axis, self.out_shape(x.shape))

    def out_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The own size along `dim`."""
        self.refuse_unless(sum(self.whole), shape[self.dim])
        return shifted(shape, self.dim, self.sizes[self.axis.rank])

    @property
    def adjoint(self) -> LinearOp:
        """Concatenate the parts' gradients at the root."""
        return Gather(self.axis, self.dim, self.root, self.sizes, **self.swapped)
