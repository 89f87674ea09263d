"""gather to a root and scatter from it, each the adjoint of the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from gradmesh.ops.base import Along, LinearOp, shifted
from gradmesh.ops.row import Example, Row, adjoints, uneven
from gradmesh.ops.sizes import Sizes
from gradmesh.ops.transport import Axis, Transport, assemble, counts, pack
from gradmesh.types import V


@dataclass(frozen=True)
class _AtRoot(Along):
    """An op between parts on all ranks and the whole at the root."""

    root: int  # the rank of the axis that has the whole tensor
    sizes: Sizes  # each rank's size along `dim`

    src, dst = V, V

    def at_root(self) -> Sequence[int]:
        """Each rank's size along `dim` at the root; zeros on the other ranks."""
        return self.sizes.explicit if self.axis.rank == self.root else (0,) * self.axis.size

    def for_root(self) -> Sequence[int]:
        """This rank's size along `dim` for the root; zero for the other ranks."""
        return [self.sizes[self.axis.rank] if rank == self.root else 0 for rank in range(self.axis.size)]


class Gather(_AtRoot):
    """V -> V at root: concatenate along `dim` at the root; empty along `dim` elsewhere."""

    verb = "gather"

    def transfer(self, x: Tensor, wire: Transport) -> Tensor:
        """Send this rank's part to the root."""
        self.sizes.of_part(self, self.dim, x.shape[self.dim])
        send = counts(x.shape, self.dim, self.for_root())
        receive = counts(x.shape, self.dim, self.at_root())
        flat = pack(x, self.dim, self.for_root())
        return assemble(
            lambda shape: wire.exchange(flat, send, receive, shape), x.shape, self.dim, self.at_root()
        )

    def out_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The sum of the sizes at the root, 0 elsewhere."""
        self.sizes.of_part(self, self.dim, shape[self.dim])
        return shifted(shape, self.dim, sum(self.at_root()))

    @property
    def adjoint(self) -> LinearOp:
        """Each rank gets its part of the root's gradient."""
        return Scatter(self.axis, self.dim, self.root, self.sizes, **self.swapped)


class Scatter(_AtRoot):
    """V at root -> V: each rank gets its part along `dim`; on the other ranks the operand is empty along `dim`."""

    verb = "scatter"
    rooted = True

    def transfer(self, x: Tensor, wire: Transport) -> Tensor:
        """Send each rank its part from the root."""
        self._check_shape(x.shape)
        send = counts(x.shape, self.dim, self.at_root())
        receive = counts(x.shape, self.dim, self.for_root())
        flat = pack(x, self.dim, self.at_root())
        return wire.exchange(flat, send, receive, self.out_shape(x.shape))

    def out_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """This rank's size along `dim`."""
        self._check_shape(shape)
        return shifted(shape, self.dim, self.sizes[self.axis.rank])

    def _check_shape(self, shape: Sequence[int]) -> None:
        size = shape[self.dim]
        if self.axis.rank == self.root:
            self.sizes.check(self, self.dim, self.sizes.total, size)
        elif size:
            self.fail(
                f"dim {self.dim} of the operand must be empty, or of the root's size, on a rank that is not the root",
                expected=f"size 0, or {self.sizes.total} as at rank {self.root}",
                got=f"size {size}",
                remedy=f"pass a tensor of size 0 along dim, x.narrow({self.dim}, 0, 0), or one of the root's shape",
            )

    @property
    def adjoint(self) -> LinearOp:
        """Concatenate the parts' gradients at the root."""
        return Gather(self.axis, self.dim, self.root, self.sizes, **self.swapped)


def _gathers(axis: Axis) -> list[Example]:
    sizes, root = uneven(axis), axis.size - 1
    return [
        (Gather(axis, 0, root, Sizes((2,) * axis.size)), (2, 3)),
        (Gather(axis, 1, 0, sizes), (2, sizes[axis.rank])),
    ]


ROWS = (
    Row("gather", "concatenate at root; empty along dim elsewhere", _gathers),
    Row("scatter", "cut at root, one part to each rank", adjoints(_gathers)),
)
