"""Rows of a tensor to the ranks that need them, and the adjoint that sends them back and adds them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from gradmesh._torch import is_fake
from gradmesh.axis import Axis
from gradmesh.dtypes import BITS
from gradmesh.errors import DTypeError
from gradmesh.ops.base import LinearOp, shifted
from gradmesh.ops.row import Example, Row
from gradmesh.ops.sizes import Sizes
from gradmesh.transport import Transport, compiling
from gradmesh.transport.packing import assemble, counts, pack
from gradmesh.types import V

__all__ = ["ROWS", "CountsByRank", "NeighborAllToAll", "NeighborReturn", "Picked", "RowsByRank", "neighbors"]

T = TypeVar("T")

Fail = Callable[..., NoReturn]
"""Raises an error of the verb: the problem, and as keyword arguments expected, got and remedy."""

RowsByRank = Mapping[int, Tensor]
"""For each rank that gets rows, which."""

CountsByRank = Mapping[int, int]
"""For each rank that sends rows, how many."""


_NEVER_PICKED = frozenset({torch.uint16, torch.uint32, torch.uint64, *BITS})
"""Dtypes that torch moves as a whole alone."""


@dataclass(frozen=True, eq=False)
class Picked:
    """Which rows go where. Two of them are equal if they are made of the same index, which is a tensor.

    Attributes:
        index: the rows for all ranks, one after another in rank order; a row may stand there more than once.
        sent: how many of them go to each rank.
        received: how many rows come from each rank.
        total: the number of rows that there are to pick from.
    """

    index: Tensor
    sent: Sizes
    received: Sizes
    total: int

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Picked) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __str__(self) -> str:
        """How many go to each rank and come from each."""
        return f"{self.sent} to each rank, {self.received} from each"

    def _key(self) -> tuple[int, Sizes, Sizes, int]:
        return id(self.index), self.sent, self.received, self.total


@dataclass(frozen=True)
class _Neighbor(LinearOp):
    """What the op and its adjoint share.

    Attributes:
        dim: the tensor dimension along which the rows lie.
        rows: which of them go where.
    """

    dim: int
    rows: Picked

    verb = "neighbor_all_to_all"
    src, dst = V, V
    rank_local_fields = ("rows",)

    def batched(self) -> _Neighbor:
        """The same op one dimension further back."""
        return replace(self, dim=self.dim + 1)

    def ragged_dims(self) -> tuple[int, ...]:
        """The number of rows, which is each rank's own affair."""
        return (self.dim,)

    def accepts(self, dtype: torch.dtype) -> None:
        """Refuse a dtype that torch does not pick rows of."""
        super().accepts(dtype)
        if dtype in _NEVER_PICKED:
            self.fail(
                "torch does not pick rows of this dtype",
                expected="a dtype that torch.index_select takes",
                got=str(dtype),
                remedy="hand in a view of another dtype of the same size, x.view(torch.int32)",
                kind=DTypeError,
            )

    def check(self, expected: int, shape: Sequence[int]) -> None:
        """Refuse an operand with another number of rows."""
        if shape[self.dim] != expected:
            self.fail(
                "the operand has not the number of rows that the index was made for",
                expected=f"{expected} rows along dim {self.dim}",
                got=f"shape {tuple(shape)}",
                remedy="make the index for this tensor",
            )

    def exchanged(self, x: Tensor, wire: Transport, sent: Sizes, received: Sizes) -> Tensor:
        """Exchange parts along `dim`."""
        send = counts(x.shape, self.dim, sent.explicit)
        receive = counts(x.shape, self.dim, received.explicit)
        flat = pack(x, self.dim, sent.explicit)
        return assemble(
            lambda shape: wire.exchange(flat, send, receive, shape), x.shape, self.dim, received.explicit
        )


class NeighborAllToAll(_Neighbor):
    """V -> V: each rank gets the rows that the others picked for it, in rank order."""

    def transfer(self, x: Tensor, wire: Transport) -> Tensor:
        """Pick, then exchange."""
        self.check(self.rows.total, x.shape)
        picked = x.resolve_conj().resolve_neg().index_select(self.dim, self.rows.index)
        return self.exchanged(picked, wire, self.rows.sent, self.rows.received)

    def out_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """As many rows as come."""
        self.check(self.rows.total, shape)
        return shifted(shape, self.dim, self.rows.received.total)

    @property
    def adjoint(self) -> LinearOp:
        """The rows' gradients sent back and added."""
        return NeighborReturn(self.axis, self.dim, self.rows, **self.swapped)


class NeighborReturn(_Neighbor):
    """V -> V: rows back to the ranks that they came from, added to where they were picked."""

    public = False
    sums = True

    def transfer(self, x: Tensor, wire: Transport) -> Tensor:
        """Exchange, then add, in an order that is the same every time."""
        rows = self.rows
        self.check(rows.received.total, x.shape)
        back = self.exchanged(x.resolve_conj().resolve_neg(), wire, rows.received, rows.sent)
        out = torch.zeros(self.out_shape(x.shape), dtype=x.dtype, device=x.device)
        if x.is_cpu:
            return out.index_add_(self.dim, rows.index, back)
        # On a GPU index_add_ adds in no fixed order, and this sorts first.
        out.movedim(self.dim, 0).index_put_((rows.index,), back.movedim(self.dim, 0), accumulate=True)
        return out

    def out_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """As many rows as there were to pick from."""
        self.check(self.rows.received.total, shape)
        return shifted(shape, self.dim, self.rows.total)

    @property
    def adjoint(self) -> LinearOp:
        """The rows picked again."""
        return NeighborAllToAll(self.axis, self.dim, self.rows, **self.swapped)


def neighbors(
    x: Tensor,
    axis: Axis,
    dim: int,
    rows: RowsByRank,
    amounts: CountsByRank,
    fail: Fail,
    **precision: Any,
) -> NeighborAllToAll:
    """The op for rows of `x` that are told by rank, as the verb takes them.

    Args:
        x: the rows.
        axis: the ranks.
        dim: the dimension along which the rows lie.
        rows: which of them go to each rank.
        amounts: how many come from each.
        fail: raises the error for a rank that is not on the axis, an index that is none, a count that is none.
        precision: what travels.
    """
    if not isinstance(rows, Mapping) or not isinstance(amounts, Mapping):
        fail(
            "the neighbours are not told by rank",
            expected="send_rows={rank: index} and receive_counts={rank: number}",
            got=f"send_rows={type(rows).__name__}, receive_counts={type(amounts).__name__}",
            remedy="pass dicts that name the ranks with something to send or to receive",
        )
    rows = _by_rank(axis.size, "send_rows", rows, fail)
    amounts = _by_rank(axis.size, "receive_counts", amounts, fail)
    wrong = {rank: n for rank, n in amounts.items() if isinstance(n, bool) or not isinstance(n, int) or n < 0}
    if wrong:
        fail(
            "receive_counts holds something else than numbers of rows",
            expected="ints of 0 or more",
            got=f"receive_counts={wrong!r}",
            remedy="give the number of rows that each rank sends to this one",
        )
    nothing = torch.empty(0, dtype=torch.int64, device=x.device)
    every = [_index(rank, rows[rank], x, dim, fail) if rank in rows else nothing for rank in range(axis.size)]
    sent = Sizes(tuple(index.shape[0] for index in every))
    received = Sizes(tuple(amounts.get(rank, 0) for rank in range(axis.size)))
    return NeighborAllToAll(axis, dim, Picked(torch.cat(every), sent, received, x.shape[dim]), **precision)


def _by_rank(size: int, name: str, params: Mapping[Any, T], fail: Fail) -> dict[int, T]:
    """The same with plain ints as keys, whatever the ranks are told as: a tensor of one, a NumPy integer."""
    found: dict[int, T] = {}
    for key, value in params.items():
        rank = operator.index(key) if hasattr(key, "__index__") and not isinstance(key, bool) else -1
        if rank not in range(size) or rank in found:
            fail(
                f"{name} names something else than ranks of the axis, each once",
                expected=f"ints with 0 <= rank < {size}",
                got=", ".join(map(repr, params)),
                remedy="count ranks along the axis, not in the world",
            )
        found[rank] = value
    return found


def _index(rank: int, index: object, x: Tensor, dim: int, fail: Fail) -> Tensor:
    """An index into a dim of `x`; its values are looked at where that costs no wait for a device."""
    if not isinstance(index, Tensor) or index.dim() != 1 or index.dtype not in (torch.int32, torch.int64):
        got = f"{index.dtype}{list(index.shape)}" if isinstance(index, Tensor) else repr(index)
        fail(
            "send_rows holds something else than an index",
            expected="1-d tensors of int64 or int32",
            got=f"send_rows[{rank}]={got}",
            remedy="use torch.tensor(rows) or mask.nonzero().squeeze(1)",
        )
    if index.device != x.device:
        fail(
            "the index and the rows are on different devices",
            expected=f"an index on {x.device}",
            got=f"send_rows[{rank}] on {index.device}",
            remedy="move the index to the tensor's device once, and keep it",
        )
    if index.is_cpu and index.numel() and not compiling() and not is_fake(index):
        first, last = int(index.min()), int(index.max())
        if first < 0 or last >= x.shape[dim]:
            fail(
                "send_rows picks rows that are not there",
                expected=f"0 <= row < {x.shape[dim]}",
                got=f"send_rows[{rank}] from {first} to {last}",
                remedy="count rows of this rank's own tensor",
            )
    return index.long()


def _picked(axis: Axis, total: int) -> Picked:
    """Rows with repetitions, in numbers that are no symmetric table and 0 for some pairs."""
    amounts = [[(r + 2 * s) % 3 for s in range(axis.size)] for r in range(axis.size)]
    sent = Sizes(tuple(amounts[axis.rank]))
    index = torch.tensor([(3 * at + axis.rank) % total for at in range(sent.total)], dtype=torch.int64)
    return Picked(index, sent, Sizes(tuple(row[axis.rank] for row in amounts)), total)


def _neighbors(axis: Axis) -> list[Example]:
    total = 2 + axis.rank % 2
    return [
        (NeighborAllToAll(axis, 0, _picked(axis, total)), (total, 2)),
        (NeighborAllToAll(axis, 1, _picked(axis, total)), (2, total)),
    ]


def _returns(axis: Axis) -> list[Example]:
    return [(op.adjoint, op.out_shape(shape)) for op, shape in _neighbors(axis)]


ROWS = (
    Row("neighbor_all_to_all", "picked rows to each rank", _neighbors),
    Row("picked rows sent back and added", "rows to where they came from, added", _returns, public=False),
)
