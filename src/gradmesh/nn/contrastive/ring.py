"""The columns of a table passed round the ranks, while each rank computes its rows of those that are there.

No rank ever holds all columns. What is summed over a column travels with it, and is at home after a whole round. As in
`tiles`, the derivatives of such a sum are such sums: in backward the columns go round once more, and their gradients
with them. What goes on is begun before a rank computes, and waited for after.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradmesh.axis import Axis
from gradmesh.collectives import all_gather, shift
from gradmesh.nn.contrastive.kernels import Adjoint, Batched, Logits, Tangent, Tensors, grouped
from gradmesh.nn.contrastive.tiles import TileWork, log_sums, merged, tiled_sum
from gradmesh.overlap.pending import Pending
from gradmesh.state import must_decompose, rank_state
from gradmesh.structure import Packed

__all__ = ["Round", "ring_log_sums", "ring_sum"]

OfColumns = Callable[[Tensors], Sequence[Tensor]]
Combined = Callable[[Tensor, Tensor], Tensor]


class _Rounds:
    """How many losses of this rank had columns that went round."""

    number = 0


@dataclass(frozen=True)
class Round:
    """The way round.

    Attributes:
        axis: the ranks.
        sizes: how many columns each has.
        comm_dtype: what embeddings travel in; logarithms of sums and the like are not rounded.
        backward_dtype: what their gradients travel in.
        number: which loss it belongs to, the same number on every rank.
        order: how many derivatives were taken.
    """

    axis: Axis
    sizes: tuple[int, ...]
    comm_dtype: torch.dtype | None
    backward_dtype: torch.dtype | None
    number: int
    order: int = 0

    @classmethod
    def started(
        cls,
        axis: Axis,
        sizes: tuple[int, ...],
        comm_dtype: torch.dtype | None,
        backward_dtype: torch.dtype | None,
        device: torch.device,
    ) -> Round:
        """The way for a loss, which takes a number: the next one of the rank that has had the most."""
        own = rank_state().get_or_create(_Rounds)
        numbers = all_gather(torch.tensor([own.number], device=device), axis)
        own.number = max(numbers.tolist()) + 1
        return cls(axis, sizes, comm_dtype, backward_dtype, own.number)

    def derived(self) -> Round:
        """That of a derivative."""
        return Round(self.axis, self.sizes, self.comm_dtype, self.backward_dtype, self.number, self.order + 1)

    def travel(self, cols: Tensors, work: OfColumns, combine: Combined) -> list[Tensor]:
        """Pass the columns round.

        Args:
            cols: this rank's.
            work: what is done with the columns that are there; returns what is summed over each of them.
            combine: how two of these are put together.

        Returns:
            What all ranks have made of this rank's columns.
        """
        ranks, coming = self.axis.size, list[Pending[Tensor]]()
        back, last = self.backward_dtype if self.order else None, ranks - 1
        if last:
            self._agree(cols)
        for step in range(ranks):
            there = cols
            dtypes = [self.comm_dtype, *[None] * (len(there) - 1)]  # the embeddings come first
            more = (
                [self._pass_on(*each, step) for each in zip(there, dtypes, strict=True)]
                if step < last
                else []
            )
            sums = list(work(there))
            if coming:
                sums = [combine(x.wait(), y) for x, y in zip(coming, sums, strict=True)]
            del there
            coming = [self._pass_on(x, back, step) for x in sums] if last else []
            cols = tuple(x.wait() for x in more)
        return [x.wait() for x in coming] if coming else sums

    def _pass_on(self, x: Tensor, dtype: torch.dtype | None, step: int) -> Pending[Tensor]:
        """Begin to send to the rank before this one what this one holds at that step."""
        sizes = (*self.sizes[step:], *self.sizes[:step])
        return shift(x, self.axis, -1, sizes=sizes, comm_dtype=dtype, async_op=True)

    def _agree(self, cols: Tensors) -> None:
        """Have the ranks compare what they are about to pass on.

        A rank that refuses to is heard of here, as it would not be among calls that are begun. And the calls alone
        would not tell the derivatives of two sums apart.
        """
        operand_desc = ", ".join(f"{str(x.dtype)[6:]}{list(x.shape[1:])}" for x in cols)
        words = f"derivative {self.order} of loss {self.number}, of columns {operand_desc}"
        all_gather(Packed(cols[0].new_zeros(1), words), self.axis)  # type: ignore[call-overload]


def ring_log_sums(
    way: Round, kernel: Logits, rows: Sequence[Tensor], cols: Sequence[Tensor], tile: int, *, columns: bool
) -> tuple[Tensor, Tensor | None, Tensors]:
    """As `tiles.log_sums`, of this rank's rows over all ranks' columns, and of this rank's columns over all rows."""
    found: list[Tensor] = []

    def work(there: Tensors) -> list[Tensor]:
        mine, theirs, more = log_sums(kernel, rows, there, tile, columns=columns)
        if found:
            mine = torch.logaddexp(found[0], mine)
            more = tuple(a + b for a, b in zip(found[1:], more, strict=True))
        found[:] = [mine, *more]
        return [] if theirs is None else [theirs]

    home = way.travel(tuple(cols), work, torch.logaddexp)
    return found[0], home[0] if columns else None, tuple(found[1:])


def ring_sum(way: Round, job: TileWork, operands: Sequence[Tensor], known: Sequence[Tensor] = ()) -> Tensors:
    """As `tiles.table_sum`, of this rank's rows over all ranks' columns, and of this rank's columns over all rows.

    Every rank takes part in the backward, whether its operands require grad or not.
    """
    known = () if must_decompose() else known
    joins = torch.zeros(1, requires_grad=True)
    found: Tensors = _RingSum.apply(way, job, len(known), joins, *known, *operands)  # type: ignore[no-untyped-call]
    return found


def _summed(way: Round, job: TileWork, operands: Sequence[Tensor]) -> Tensors:
    rows, cols, shared = grouped(operands, job.kernel.counts)
    mine: list[Tensor] = []
    kept = job.kernel.outputs

    def work(there: Tensors) -> Tensors:
        of_rows, of_cols, of_all = grouped(tiled_sum(job, *rows, *there, *shared), kept)
        here = (*of_rows, *of_all)
        mine[:] = [a.add_(b) for a, b in zip(mine, here, strict=True)] if mine else here
        return of_cols

    home = way.travel(cols, work, torch.add)
    return (*mine[: kept.rows], *home, *mine[kept.rows :])


class _RingSum(torch.autograd.Function):
    """A sum over tiles whose columns go round, every derivative of which is one."""

    @staticmethod
    def forward(way: Round, job: TileWork, known: int, joins: Tensor, *tensors: Tensor) -> Tensors:  # noqa: ARG004
        if known:
            return tuple(y.clone() for y in tensors[:known])
        return _summed(way, job, tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:  # noqa: ARG004
        ctx.way, ctx.job, ctx.known, _, *tensors = inputs
        ctx.save_for_backward(*tensors[ctx.known :])
        ctx.save_for_forward(*tensors[ctx.known :])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # Whose gradients are wanted is not asked: the other ranks need those of their columns.
        kernel, operands = ctx.job.kernel, ctx.saved_tensors
        wanted = kernel.differentiated
        laid = merged(kernel, operands, grads)
        found = iter(ring_sum(ctx.way.derived(), TileWork(Adjoint(kernel, wanted), ctx.job.tile), laid))
        given = (
            next(found).to(x.dtype) if is_wanted else None
            for x, is_wanted in zip(operands, wanted, strict=True)
        )
        return (*[None] * (4 + ctx.known), *given)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensors:
        kernel, operands = ctx.job.kernel, ctx.saved_tensors
        moved = kernel.differentiated
        given = tangents[4 + ctx.known :]
        filled = [
            torch.zeros_like(x) if t is None else t
            for x, t, d in zip(operands, given, moved, strict=True)
            if d
        ]
        flags, along = iter(moved), iter(filled)
        groups = grouped(operands, kernel.counts)
        laid = [x for own in groups for x in (*own, *[next(along) for _ in own if next(flags)])]
        return ring_sum(ctx.way.derived(), TileWork(Tangent(kernel, moved), ctx.job.tile), laid)

    @staticmethod
    def vmap(
        _: Any,
        in_dims: tuple[int | None, ...],
        way: Round,
        job: TileWork,
        known: int,
        __: Tensor,
        *tensors: Tensor,
    ) -> Any:
        operands, dims = tensors[known:], in_dims[4 + known :]
        cut = job.kernel.counts.rows + job.kernel.counts.cols
        moved = [
            x if dim is None else x.movedim(dim, int(place < cut))
            for place, (x, dim) in enumerate(zip(operands, dims, strict=True))
        ]
        batched = Batched(job.kernel, tuple(dim is not None for dim in dims))
        found = ring_sum(way, TileWork(batched, job.tile), moved)
        cut = job.kernel.outputs.rows + job.kernel.outputs.cols
        return found, tuple(int(place < cut) for place in range(len(found)))
