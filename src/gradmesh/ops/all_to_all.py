"""all_to_all: each rank splits its tensor, sends a part to every rank and joins what it receives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from gradmesh.ops.base import PLAIN, LinearOp, shifted
from gradmesh.ops.row import Example, Row, uneven
from gradmesh.ops.sizes import EQUAL, Sizes
from gradmesh.ops.transport import Axis, Transport, assemble, counts, pack
from gradmesh.types import V


@dataclass(frozen=True)
class AllToAll(LinearOp):
    """V -> V: split along `split_dim`, exchange, concatenate along `concat_dim`."""

    split_dim: int  # the dimension that is cut
    concat_dim: int  # the dimension along which the received parts are joined
    split_sizes: Sizes  # the size of the part for each rank
    concat_sizes: Sizes  # each received part's size along `concat_dim`; equal: what an equal split gives

    verb = "all_to_all"
    src, dst = V, V
    rank_local_fields = ("split_sizes", "concat_sizes")

    @property
    def symmetric(self) -> bool:  # type: ignore[override]
        """Whether all parts are equal."""
        return self.split_sizes.equal and self.concat_sizes.equal

    def ragged_dims(self) -> tuple[int, ...]:
        """The split and concatenated dims, where explicit sizes are passed."""
        cut = () if self.split_sizes.equal or self.split_dim != self.concat_dim else (self.split_dim,)
        return cut if self.concat_sizes.equal else (*cut, self.concat_dim)

    def _split(self, shape: Sequence[int]) -> Sequence[int]:
        """The size of the part for each rank."""
        return self.split_sizes.of_whole(self, self.split_dim, shape[self.split_dim])

    def _received(self, shape: Sequence[int]) -> list[tuple[int, ...]]:
        """The shape of the part that comes from each rank."""
        mine = self._split(shape)[self.axis.rank]
        if self.split_dim == self.concat_dim:
            sizes = (mine,) * self.axis.size if self.concat_sizes.equal else self.concat_sizes.explicit
            return [shifted(shape, self.concat_dim, n) for n in sizes]
        joined = self.concat_sizes.of_part(self, self.concat_dim, shape[self.concat_dim])
        return [shifted(shifted(shape, self.split_dim, mine), self.concat_dim, n) for n in joined]

    def layout(
        self, shape: Sequence[int]
    ) -> tuple[Sequence[int], Sequence[int], Sequence[int], Sequence[int], tuple[int, ...], bool]:
        """Split sizes, elements to send and to receive, joined sizes, the shape of a received part, and `symmetric`."""
        sizes, shapes = self._split(shape), self._received(shape)
        receive, joined = [math.prod(s) for s in shapes], [s[self.concat_dim] for s in shapes]
        return sizes, counts(shape, self.split_dim, sizes), receive, joined, shapes[0], self.symmetric

    def transfer(self, x: Tensor, wire: Transport) -> Tensor:
        """Pack a part for each rank, exchange, join."""
        known = self.memo.get(x.shape) if type(x) in PLAIN else None
        sizes, send, receive, joined, shape, even = known or self.once(x, self.layout)
        flat = pack(x, self.split_dim, sizes)
        return assemble(
            lambda shape: wire.exchange(flat, send, receive, shape, even=even), shape, self.concat_dim, joined
        )

    def out_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """This rank's part along `split_dim`, the sum of the received parts along `concat_dim`."""
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


def _exchanges(axis: Axis) -> list[Example]:
    """All-to-alls with the same and with different dims, equal and uneven."""
    size, rank = axis.size, axis.rank
    sizes = uneven(axis)
    turned = Sizes(tuple(reversed(sizes.explicit)))
    # What rank r sends to rank s, as a table that is not symmetric.
    amounts = [[(r + 2 * s) % 3 for s in range(size)] for r in range(size)]
    ragged = AllToAll(axis, 0, 0, Sizes(tuple(amounts[rank])), Sizes(tuple(row[rank] for row in amounts)))
    return [
        (AllToAll(axis, 0, 1, EQUAL, EQUAL), (2 * size, 3)),
        (AllToAll(axis, 0, 0, EQUAL, EQUAL), (2 * size, 3)),
        (AllToAll(axis, 2, 0, EQUAL, EQUAL), (2, 1, size)),
        (ragged, (sum(amounts[rank]), 2)),
        (AllToAll(axis, 1, 0, sizes, turned), (turned[rank], sizes.total)),
    ]


ROWS = (Row("all_to_all", "split, exchange, concatenate", _exchanges, "splits and dims swapped"),)
