"""Columns of a table travel around the ring of ranks, while each rank computes its rows with the current block.

No rank holds all columns at once. Sums over a column travel with it and return to its rank. As in `tiles`, derivatives
of such a sum are such sums: in backward the columns travel again, with their gradients. Each transfer is started before
the computation that it overlaps with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gradmesh._util.structure import Packed
from gradmesh.autograd.pending import Pending
from gradmesh.nn.contrastive.kernels import Adjoint, Batched, Logits, Tangent, Tensors, grouped
from gradmesh.nn.contrastive.tiles import TileWork, log_sums, merged, tiled_sum
from gradmesh.runtime.mesh import Axis
from gradmesh.runtime.state import must_decompose, rank_state
from gradmesh.verbs.collectives import all_gather, shift

__all__ = ["RingPass", "ring_log_sums", "ring_sum"]

OfColumns = Callable[[Tensors], Sequence[Tensor]]
Combined = Callable[[Tensor, Tensor], Tensor]


class _LossCounter:
    """Number of ring losses of this rank so far."""

    number = 0


@dataclass(frozen=True)
class RingPass:
    """Sends the columns of one loss around the ring.

    Attributes:
        axis: the ranks.
        sizes: each rank's number of columns.
        comm_dtype: the dtype in which embeddings are sent; other operands are not rounded.
        backward_dtype: the dtype in which gradients are sent.
        number: identifies the loss, the same on every rank.
        order: the order of the derivative.
    """

    axis: Axis
    sizes: tuple[int, ...]
    comm_dtype: torch.dtype | None
    backward_dtype: torch.dtype | None
    number: int
    order: int = 0

    @classmethod
    def create(
        cls,
        axis: Axis,
        sizes: tuple[int, ...],
        comm_dtype: torch.dtype | None,
        backward_dtype: torch.dtype | None,
        device: torch.device,
    ) -> RingPass:
        """The pass of a new loss; its number is one more than the largest of any rank."""
        counter = rank_state().get_or_create(_LossCounter)
        numbers = all_gather(torch.tensor([counter.number], device=device), axis)
        counter.number = max(numbers.tolist()) + 1
        return cls(axis, sizes, comm_dtype, backward_dtype, counter.number)

    def derived(self) -> RingPass:
        """The pass of a derivative."""
        return replace(self, order=self.order + 1)

    def travel(self, cols: Tensors, work: OfColumns, combine: Combined) -> list[Tensor]:
        """Send the columns around the ring.

        Args:
            cols: this rank's columns.
            work: computes the sums over the rows of this rank, for each current column.
            combine: combines two such sums.

        Returns:
            The sums over the rows of all ranks, for this rank's columns.
        """
        ranks, coming = self.axis.size, list[Pending[Tensor]]()
        back, last = self.backward_dtype if self.order else None, ranks - 1
        if last:
            self._agree(cols)
        for step in range(ranks):
            current = cols
            dtypes = [self.comm_dtype, *[None] * (len(current) - 1)]  # the embeddings come first
            following = (
                [self._send(*each, step) for each in zip(current, dtypes, strict=True)] if step < last else []
            )
            sums = list(work(current))
            if coming:
                sums = [combine(x.wait(), y) for x, y in zip(coming, sums, strict=True)]
            del current
            coming = [self._send(x, back, step) for x in sums] if last else []
            cols = tuple(x.wait() for x in following)
        return [x.wait() for x in coming] if coming else sums

    def _send(self, x: Tensor, dtype: torch.dtype | None, step: int) -> Pending[Tensor]:
        """Start sending the current block to the preceding rank."""
        sizes = (*self.sizes[step:], *self.sizes[:step])
        return shift(x, self.axis, -1, sizes=sizes, comm_dtype=dtype, async_op=True)

    def _agree(self, cols: Tensors) -> None:
        """Compare the ranks' columns before they are sent.

        A synchronous call reports another rank's error before async calls are pending. It also distinguishes the
        derivatives of two losses, which the ring's calls do not.
        """
        operand_desc = ", ".join(f"{str(x.dtype)[6:]}{list(x.shape[1:])}" for x in cols)
        signature = f"derivative {self.order} of loss {self.number}, of columns {operand_desc}"
        all_gather(Packed(cols[0].new_zeros(1), signature), self.axis)  # type: ignore[call-overload]


def ring_log_sums(
    ring: RingPass,
    kernel: Logits,
    rows: Sequence[Tensor],
    cols: Sequence[Tensor],
    tile: int,
    *,
    columns: bool,
) -> tuple[Tensor, Tensor | None, Tensors]:
    """`tiles.log_sums` of this rank's rows over all ranks' columns, and of this rank's columns over all rows."""
    found: list[Tensor] = []

    def work(current: Tensors) -> list[Tensor]:
        of_rows, of_cols, more = log_sums(kernel, rows, current, tile, columns=columns)
        if found:
            of_rows = torch.logaddexp(found[0], of_rows)
            more = tuple(a + b for a, b in zip(found[1:], more, strict=True))
        found[:] = [of_rows, *more]
        return [] if of_cols is None else [of_cols]

    local = ring.travel(tuple(cols), work, torch.logaddexp)
    return found[0], local[0] if columns else None, tuple(found[1:])


def ring_sum(
    ring: RingPass, job: TileWork, operands: Sequence[Tensor], known: Sequence[Tensor] = ()
) -> Tensors:
    """`tiles.table_sum` of this rank's rows over all ranks' columns, and of this rank's columns over all rows.

    Every rank takes part in the backward, whether its operands require grad or not.
    """
    known = () if must_decompose() else known
    anchor = torch.zeros(1, requires_grad=True)
    found: Tensors = _RingSum.apply(ring, job, len(known), anchor, *known, *operands)  # type: ignore[no-untyped-call]
    return found


def _summed(ring: RingPass, job: TileWork, operands: Sequence[Tensor]) -> Tensors:
    rows, cols, shared = grouped(operands, job.kernel.counts)
    sums: list[Tensor] = []
    counts = job.kernel.outputs

    def work(current: Tensors) -> Tensors:
        of_rows, of_cols, of_all = grouped(tiled_sum(job, *rows, *current, *shared), counts)
        more = (*of_rows, *of_all)
        sums[:] = [a.add_(b) for a, b in zip(sums, more, strict=True)] if sums else more
        return of_cols

    local = ring.travel(cols, work, torch.add)
    return (*sums[: counts.rows], *local, *sums[counts.rows :])


class _RingSum(torch.autograd.Function):
    """A sum over tiles with columns from the ring; each of its derivatives is one too."""

    @staticmethod
    def forward(ring: RingPass, job: TileWork, known: int, anchor: Tensor, *tensors: Tensor) -> Tensors:  # noqa: ARG004
        if known:
            return tuple(y.clone() for y in tensors[:known])
        return _summed(ring, job, tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:  # noqa: ARG004
        ctx.ring, ctx.job, ctx.known, _, *tensors = inputs
        ctx.save_for_backward(*tensors[ctx.known :])
        ctx.save_for_forward(*tensors[ctx.known :])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # Ignore needs_input_grad: other ranks need the gradients of their columns.
        kernel, operands = ctx.job.kernel, ctx.saved_tensors
        wanted = kernel.differentiated
        job = TileWork(Adjoint(kernel, wanted), ctx.job.tile)
        found = iter(ring_sum(ctx.ring.derived(), job, merged(kernel, operands, grads)))
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
        inputs = [x for group in groups for x in (*group, *[next(along) for _ in group if next(flags)])]
        return ring_sum(ctx.ring.derived(), TileWork(Tangent(kernel, moved), ctx.job.tile), inputs)

    @staticmethod
    def vmap(
        _: Any,
        in_dims: tuple[int | None, ...],
        ring: RingPass,
        job: TileWork,
        known: int,
        __: Tensor,
        *tensors: Tensor,
    ) -> Any:
        operands, dims = tensors[known:], in_dims[4 + known :]
        cut = job.kernel.counts.rows + job.kernel.counts.cols
        moved = [
            x if dim is None else x.movedim(dim, int(i < cut))
            for i, (x, dim) in enumerate(zip(operands, dims, strict=True))
        ]
        batched = Batched(job.kernel, tuple(dim is not None for dim in dims))
        found = ring_sum(ring, TileWork(batched, job.tile), moved)
        cut = job.kernel.outputs.rows + job.kernel.outputs.cols
        return found, tuple(int(i < cut) for i in range(len(found)))
