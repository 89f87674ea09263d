"""Halo exchange: attach the neighbours' edge rows to this rank's shard; the adjoint sends them back and adds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from gradmesh.ops.base import Along, LinearOp, shifted
from gradmesh.ops.row import Example, Row, adjoints, uneven
from gradmesh.ops.sizes import Sizes
from gradmesh.ops.transport import Axis, Transport
from gradmesh.types import V


class Segment(NamedTuple):
    """Rows of one rank's shard."""

    owner: int
    start: int
    length: int


@lru_cache(maxsize=256)
def plan(sizes: tuple[int, ...], left: int, right: int, wrap: bool) -> tuple[tuple[Segment, ...], ...]:
    """For each rank, the segments that make up its result, in order.

    The shards form a line, or a ring with `wrap`. A halo that is wider than a shard takes its further rows from the
    next ranks, around the ring as often as needed.

    >>> plan((2, 1, 3), 2, 1, False)[2]
    (Segment(owner=0, start=1, length=1), Segment(owner=1, start=0, length=1), Segment(owner=2, start=0, length=3))
    """
    ends = list(accumulate(sizes, initial=0))
    total = ends[-1]
    out = []
    for rank, size in enumerate(sizes):
        first, last = ends[rank] - left, ends[rank] + size + right
        if not wrap or total == 0:
            first, last = max(first, 0), min(last, total)
        segments = []
        for lap in range(first // max(total, 1), (last - 1) // max(total, 1) + 1):
            for owner, begin in enumerate(ends[:-1]):
                begin += lap * total
                low, high = max(first, begin), min(last, begin + sizes[owner])
                if low < high:
                    segments.append(Segment(owner, low - begin, high - low))
        out.append(tuple(segments))
    return tuple(out)


@dataclass(frozen=True)
class _Halo(Along):
    """Base of the op and its adjoint."""

    left: int  # rows taken from the ranks before
    right: int  # rows taken from the ranks after
    wrap: bool  # whether the last rank's neighbour is the first
    sizes: Sizes  # each rank's size along `dim`

    verb = "halo_exchange"
    src, dst = V, V

    def params(self) -> dict[str, object]:
        """The verb's arguments, with left and right as `halo`."""
        params = super().params()
        params["halo"] = (params.pop("left"), params.pop("right"))
        return params

    @property
    def plan(self) -> tuple[tuple[Segment, ...], ...]:
        """Every rank's segments."""
        if any(type(size) is not int for size in self.sizes.explicit):  # symbolic sizes are not hashable
            return plan.__wrapped__(self.sizes.explicit, self.left, self.right, self.wrap)
        return plan(self.sizes.explicit, self.left, self.right, self.wrap)

    def moved(self, owner: int, to: int) -> list[Segment]:
        """A rank's rows in the result of another rank; empty for the same rank."""
        return [s for s in self.plan[to] if s.owner == owner] if to != owner else []

    def swap(
        self, x: Tensor, wire: Transport, pieces: list[list[Tensor]], expected: list[list[Segment]]
    ) -> list[list[Tensor]]:
        """Send each rank its pieces and receive the expected ones, each as a view of one fresh buffer.

        All pieces between two ranks are sent as one message; on a ring of two, both neighbours are the same rank.
        """
        row = x.shape[: self.dim].numel() * x.shape[self.dim + 1 :].numel()
        flat = torch.cat([piece.reshape(-1) for to in pieces for piece in to] or [x.new_empty(0)])
        send = [sum(piece.numel() for piece in to) for to in pieces]
        receive = [row * sum(s.length for s in segments) for segments in expected]
        got = wire.exchange(flat, send, receive).split(
            [row * s.length for segments in expected for s in segments]
        )
        views = iter(got)
        return [
            [next(views).view(shifted(x.shape, self.dim, s.length)) for s in segments]
            for segments in expected
        ]


class HaloExchange(_Halo):
    """V -> V: attach the edge rows of the neighbours; at open ends nothing is attached."""

    def transfer(self, x: Tensor, wire: Transport) -> Tensor:
        """Send edge rows to the ranks that need them, and concatenate the received rows around this rank's rows."""
        ranks, me = range(self.axis.size), self.axis.rank
        self.sizes.of_part(self, self.dim, x.shape[self.dim])
        x = x.resolve_conj().resolve_neg()
        pieces = [[x.narrow(self.dim, s.start, s.length) for s in self.moved(me, to)] for to in ranks]
        received = [
            iter(views) for views in self.swap(x, wire, pieces, [self.moved(owner, me) for owner in ranks])
        ]
        joined = [
            x.narrow(self.dim, s.start, s.length) if s.owner == me else next(received[s.owner])
            for s in self.plan[me]
        ]
        return torch.cat(joined or [x], self.dim)

    def out_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """This rank's size plus the attached rows."""
        self.sizes.of_part(self, self.dim, shape[self.dim])
        return shifted(shape, self.dim, sum(s.length for s in self.plan[self.axis.rank]))

    @property
    def adjoint(self) -> LinearOp:
        """Send the gradients of the attached rows back and add them."""
        return HaloReturn(self.axis, self.dim, self.left, self.right, self.wrap, self.sizes, **self.swapped)


class HaloReturn(_Halo):
    """V -> V: send the attached rows back to their owners and add them there. The adjoint of `halo_exchange`."""

    public = False
    sums = True

    def transfer(self, x: Tensor, wire: Transport) -> Tensor:
        """Send the attached rows back and add the received ones."""
        ranks, me = range(self.axis.size), self.axis.rank
        lengths = [s.length for s in self.plan[me]]
        self.sizes.check(self, self.dim, sum(lengths), x.shape[self.dim])
        x = x.resolve_conj().resolve_neg()
        slabs = list(zip(self.plan[me], x.split(lengths, self.dim), strict=True)) if lengths else []
        pieces = [[slab for s, slab in slabs if s.owner == owner and owner != me] for owner in ranks]
        own = [(s, slab) for s, slab in slabs if s.owner == me]
        rows_for = [self.moved(me, to) for to in ranks]
        for segments, views in zip(rows_for, self.swap(x, wire, pieces, rows_for), strict=True):
            own.extend(zip(segments, views, strict=True))
        out = x.new_zeros(self.out_shape(x.shape))
        for s, slab in own:
            out.narrow(self.dim, s.start, s.length).add_(slab)
        return out

    def out_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """This rank's size."""
        self.sizes.check(self, self.dim, sum(s.length for s in self.plan[self.axis.rank]), shape[self.dim])
        return shifted(shape, self.dim, self.sizes[self.axis.rank])

    @property
    def adjoint(self) -> LinearOp:
        """The halo exchange."""
        return HaloExchange(self.axis, self.dim, self.left, self.right, self.wrap, self.sizes, **self.swapped)


def _halos(axis: Axis) -> list[Example]:
    sizes = uneven(axis)

    def equal(rows: int) -> Sizes:
        return Sizes((rows,) * axis.size)

    return [
        (HaloExchange(axis, 0, 1, 1, False, equal(3)), (3, 2)),
        (HaloExchange(axis, 1, 1, 2, True, equal(2)), (2, 2)),
        (HaloExchange(axis, 0, 3, 0, False, equal(1)), (1, 2)),
        (HaloExchange(axis, 0, 3, 4, True, equal(1)), (1, 2)),
        (HaloExchange(axis, 0, 2, 1, False, sizes), (sizes[axis.rank], 2)),
    ]


ROWS = (
    Row("halo_exchange", "neighbours' edge slabs attached", _halos),
    Row("edge slabs sent back and added", "slabs to their owners, added", adjoints(_halos), public=False),
)
