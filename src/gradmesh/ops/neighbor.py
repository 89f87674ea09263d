"""Send selected rows to the ranks that need them; the adjoint sends their gradients back and adds them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradmesh._util.dtypes import BITS
from gradmesh.errors import DTypeError
from gradmesh.ops.base import Along, LinearOp, shifted
from gradmesh.ops.row import Example, Row, adjoints
from gradmesh.ops.sizes import Sizes
from gradmesh.ops.transport import Axis, Transport, assemble, counts, pack
from gradmesh.types import V

_NEVER_PICKED = frozenset({torch.uint16, torch.uint32, torch.uint64, *BITS})
"""Dtypes without index_select in torch."""


@dataclass(frozen=True, eq=False)
class Picked:
    """Which rows are sent where. Equality compares the identity of the index tensor."""

    index: Tensor  # the rows for all ranks, in rank order; rows may repeat
    sent: Sizes  # the number of rows for each rank
    received: Sizes  # the number of rows from each rank
    total: int  # the number of rows of the operand

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Picked) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __str__(self) -> str:
        """Row counts to and from each rank."""
        return f"{self.sent} to each rank, {self.received} from each"

    def _key(self) -> tuple[int, Sizes, Sizes, int]:
        return id(self.index), self.sent, self.received, self.total


@dataclass(frozen=True)
class _Neighbor(Along):
    """Base of the op and its adjoint."""

    rows: Picked  # which of them are sent where

    identity = ()  # not kept: it has tensors

    verb = "neighbor_all_to_all"
    src, dst = V, V
    rank_local_fields = ("rows",)

    def accepts(self, dtype: torch.dtype) -> None:
        """Raise for a dtype without index_select."""
        super().accepts(dtype)
        if dtype in _NEVER_PICKED:
            self.fail(
                "unsupported dtype: torch.index_select does not implement it",
                expected="a dtype that torch.index_select supports",
                got=str(dtype),
                remedy="pass a view of another dtype of the same size, for example x.view(torch.int32) for uint32",
                kind=DTypeError,
            )

    def check(self, expected: int, shape: Sequence[int]) -> None:
        """Raise for an operand with another number of rows."""
        if shape[self.dim] != expected:
            self.fail(
                "the operand has another number of rows than the index was built for",
                expected=f"{expected} rows along dim {self.dim}",
                got=f"{shape[self.dim]} rows: shape {tuple(shape)}",
                remedy="build the index for this tensor, or pass the tensor that it was built for",
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
    """V -> V: each rank gets the rows that the other ranks selected for it, in rank order."""

    def transfer(self, x: Tensor, wire: Transport) -> Tensor:
        """Select rows, then exchange."""
        self.check(self.rows.total, x.shape)
        picked = x.resolve_conj().resolve_neg().index_select(self.dim, self.rows.index)
        return self.exchanged(picked, wire, self.rows.sent, self.rows.received)

    def out_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """As many rows as are received."""
        self.check(self.rows.total, shape)
        return shifted(shape, self.dim, self.rows.received.total)

    @property
    def adjoint(self) -> LinearOp:
        """Send the rows' gradients back and add them."""
        return NeighborReturn(self.axis, self.dim, self.rows, **self.swapped)


class NeighborReturn(_Neighbor):
    """V -> V: send rows back to the ranks that they came from, and add them at their index."""

    public = False
    sums = True

    def transfer(self, x: Tensor, wire: Transport) -> Tensor:
        """Exchange, then add in a deterministic order."""
        rows = self.rows
        self.check(rows.received.total, x.shape)
        back = self.exchanged(x.resolve_conj().resolve_neg(), wire, rows.received, rows.sent)
        out = torch.zeros(self.out_shape(x.shape), dtype=x.dtype, device=x.device)
        if x.is_cpu:
            return out.index_add_(self.dim, rows.index, back)
        # On a GPU index_add_ is not deterministic; index_put_ sorts first.
        out.movedim(self.dim, 0).index_put_((rows.index,), back.movedim(self.dim, 0), accumulate=True)
        return out

    def out_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """As many rows as the forward's operand."""
        self.check(self.rows.received.total, shape)
        return shifted(shape, self.dim, self.rows.total)

    @property
    def adjoint(self) -> LinearOp:
        """Select the rows again."""
        return NeighborAllToAll(self.axis, self.dim, self.rows, **self.swapped)


def _picked(axis: Axis, total: int) -> Picked:
    """Rows with repetitions, with asymmetric counts, 0 for some pairs."""
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


ROWS = (
    Row("neighbor_all_to_all", "picked rows to each rank", _neighbors),
    Row(
        "picked rows sent back and added",
        "rows to where they came from, added",
        adjoints(_neighbors),
        public=False,
    ),
)
