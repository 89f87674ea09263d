"""all_gather into a replicated value, and its adjoint reduce_scatter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from gradmesh.ops.base import PLAIN, Along, shifted
from gradmesh.ops.row import Example, Examples, Row, uneven
from gradmesh.ops.sizes import EQUAL, Sizes
from gradmesh.ops.transport import Axis, Transport, as_flat, assemble, counts, pack
from gradmesh.types import P, R, V


@dataclass(frozen=True)
class Split(Along):
    """An op that cuts or joins along a tensor dimension."""

    sizes: Sizes  # each rank's size along it

    @property
    def symmetric(self) -> bool:  # type: ignore[override]
        """Whether all parts are equal."""
        return self.sizes.equal

    def ragged_dims(self) -> tuple[int, ...]:
        """`dim`, if explicit sizes are passed."""
        return () if self.sizes.equal else (self.dim,)

    def parts(self, shape: Sequence[int]) -> Sequence[int]:
        """Each rank's size along `dim`, of an operand that is whole."""
        return self.sizes.of_whole(self, self.dim, shape[self.dim])

    def pieces(self, shape: Sequence[int]) -> Sequence[int]:
        """Each rank's size along `dim`, of an operand that is this rank's part."""
        return self.sizes.of_part(self, self.dim, shape[self.dim])


class Join(Split):
    """Concatenate the ranks' parts along `dim`, on every rank. Subclasses define the types and the adjoint."""

    def layout(self, shape: Sequence[int]) -> tuple[Sequence[int], Sequence[int], Sequence[int] | None]:
        """Each rank's size along `dim`, its element count, and the result's shape if the parts are contiguous in it."""
        sizes = self.pieces(shape)
        in_a_row = self.dim == 0 or math.prod(shape[: self.dim]) == 1
        return (
            sizes,
            counts(shape, self.dim, sizes),
            shifted(shape, self.dim, sum(sizes)) if in_a_row else None,
        )

    def transfer(self, x: Tensor, wire: Transport) -> Tensor:
        """Gather, then put the parts side by side along `dim`."""
        known = self.memo.get(x.shape) if type(x) in PLAIN else None
        sizes, lengths, whole = known or self.once(x, self.layout)
        flat = as_flat(x)
        if whole is not None:
            return wire.gather(flat, lengths, whole, even=self.sizes.each is None)
        return assemble(
            lambda shape: wire.gather(flat, lengths, shape, even=self.sizes.each is None),
            x.shape,
            self.dim,
            sizes,
        )

    def out_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The sum of the sizes along `dim`."""
        return shifted(shape, self.dim, sum(self.pieces(shape)))


class AllGather(Join):
    """V -> R: concatenate along `dim`; each rank uses the result differently."""

    verb = "all_gather"
    chosen = ("dst",)
    src, dst = V, R

    @property
    def adjoint(self) -> ReduceScatter:
        """Sum the ranks' gradients and keep this rank's slice."""
        return ReduceScatter(self.axis, self.dim, self.sizes, **self.swapped)


class ReduceScatter(Split):
    """P -> V: sum over the ranks and keep this rank's slice along `dim`."""

    verb = "reduce_scatter"
    src, dst = P, V
    sums = True

    def layout(self, shape: Sequence[int]) -> tuple[Sequence[int], Sequence[int], tuple[int, ...]]:
        """Each rank's size along `dim`, its element count, and the shape of this rank's part."""
        sizes = self.parts(shape)
        return sizes, counts(shape, self.dim, sizes), shifted(shape, self.dim, sizes[self.axis.rank])

    def transfer(self, x: Tensor, wire: Transport) -> Tensor:
        """Send each rank its slice and add the received ones."""
        known = self.memo.get(x.shape) if type(x) in PLAIN else None
        sizes, lengths, shape = known or self.once(x, self.layout)
        flat = pack(x, self.dim, sizes)
        return wire.sum_and_scatter(flat, lengths, shape, even=self.sizes.each is None)

    def out_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """This rank's size along `dim`."""
        return shifted(shape, self.dim, self.parts(shape)[self.axis.rank])

    @property
    def adjoint(self) -> AllGather:
        """Concatenate the ranks' gradients."""
        return AllGather(self.axis, self.dim, self.sizes, **self.swapped)


def parts(op: type[Split]) -> Examples:
    """Examples of an op whose operand is one part: each dim, equal and uneven."""

    def examples(axis: Axis) -> list[Example]:
        sizes = uneven(axis)
        own = sizes[axis.rank]
        return [
            (op(axis, 0, EQUAL), (2, 3)),
            (op(axis, 1, EQUAL), (2, 3)),
            (op(axis, 2, EQUAL), (2, 1, 2)),
            (op(axis, 0, sizes), (own, 2)),
            (op(axis, 1, sizes), (2, own)),
        ]

    return examples


def wholes(op: type[Split]) -> Examples:
    """Examples of an op whose operand is whole: each dim, equal and uneven."""

    def examples(axis: Axis) -> list[Example]:
        sizes = uneven(axis)
        return [
            (op(axis, 0, EQUAL), (2 * axis.size, 3)),
            (op(axis, 1, EQUAL), (2, axis.size)),
            (op(axis, 2, EQUAL), (2, 1, 2 * axis.size)),
            (op(axis, 0, sizes), (sizes.total, 2)),
            (op(axis, 1, sizes), (2, sizes.total)),
        ]

    return examples


ROWS = (
    Row("all_gather(dst=R)", "concatenate along dim (0-d: stack)", parts(AllGather)),
    Row("reduce_scatter", "sum, keep own slice", wholes(ReduceScatter)),
)
