"""Sums over the table of all pairs of samples, in tiles and in every autodiff mode.

A kernel computes a tile. It takes operands in three groups: sliced along the rows of the table, sliced along its
columns, and shared by all tiles; and returns outputs in the same groups, summed over a row of tiles, over a column, and
over all tiles. Its adjoint and its tangent are kernels of the same form, so backward is the same sum with the adjoint,
which computes each tile again: forward saves the operands only.

Rows are local. Columns are gathered, or travel around the ring of ranks with the sums over them, so that no rank holds
all columns at once; in backward they travel again, with their gradients. Each transfer is started before the
computation that it overlaps with.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.func import vjp
from torch.nn.functional import softplus
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from gradmesh._torch import to_list, transforms_active
from gradmesh._util.structure import Packed
from gradmesh.errors import ArgumentError, MismatchError, ShapeError
from gradmesh.nn.attention import travel
from gradmesh.nn.inputs import check_own_size, upcast
from gradmesh.runtime.mesh import Axis, AxisLike
from gradmesh.runtime.state import must_decompose, rank_state
from gradmesh.transport import compiling
from gradmesh.transport.run import constants, exchange_device
from gradmesh.types import Convention, I, R
from gradmesh.verbs.call import Call, SizesLike, integer
from gradmesh.verbs.collectives import all_gather, all_reduce, reduce_scatter, shift

T = TypeVar("T")
Tensors = tuple[Tensor, ...]
Logits = Callable[..., tuple[Tensor, Tensors]]
"""Computes the logits of one tile, and other quantities that are summed over each row."""


class Counts(NamedTuple):
    """Number of tensors of each group."""

    rows: int
    cols: int
    shared: int


@dataclass(frozen=True)
class Kernel:
    """The computation of one tile."""

    run: Callable[..., Tensors]
    counts: Counts  # number of operands
    outputs: Counts
    differentiated: tuple[bool, ...]  # which operands are differentiable


@dataclass(frozen=True)
class ExpKernel(Kernel):
    """A kernel of exp(logits - x_i), summed over a row, and exp(logits - y_j), summed over a column."""

    logits: Logits


def grouped(items: Sequence[T], counts: Counts) -> tuple[tuple[T, ...], tuple[T, ...], tuple[T, ...]]:
    """Split operands, outputs or flags into their groups."""
    rows, cols = counts.rows, counts.rows + counts.cols
    return tuple(items[:rows]), tuple(items[rows:cols]), tuple(items[cols:])


def _joined(first: Sequence[T], of_first: Counts, second: Sequence[T], of_second: Counts) -> list[T]:
    """Each group of `first`, followed by the same group of `second`."""
    groups = zip(grouped(first, of_first), grouped(second, of_second), strict=True)
    return [x for group, more in groups for x in (*group, *more)]


def _separated(joined: Sequence[T], of_first: Counts, of_both: Counts) -> tuple[tuple[T, ...], tuple[T, ...]]:
    """Inverse of `_joined`."""
    groups = list(zip(grouped(joined, of_both), of_first, strict=True))
    first = tuple(x for group, n in groups for x in group[:n])
    return first, tuple(x for group, n in groups for x in group[n:])


def _chosen(flags: Sequence[bool], counts: Counts) -> Counts:
    """The number of flags that are set in each group."""
    return Counts(*map(sum, grouped(flags, counts)))


def _added(a: Counts, b: Counts) -> Counts:
    return Counts(*(x + y for x, y in zip(a, b, strict=True)))


def _similarities(a: Tensor, b: Tensor) -> tuple[Tensor, Tensors]:
    return a @ b.T, ()


def _exp_both(a: Tensor, x: Tensor, b: Tensor, y: Tensor) -> Tensors:
    s = a @ b.T
    return (s - x[:, None]).exp().sum(1), (s - y).exp().sum(0)


EXP_BOTH = ExpKernel(_exp_both, Counts(2, 2, 0), Counts(1, 1, 0), (True, False, True, False), _similarities)
"""exp(s - x_i) summed over a row and exp(s - y_j) summed over a column, of the similarities s."""


def _itself(number: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """A column of each row, and whether the sample meets itself there; columns have consecutive numbers.

    A mask of the table would be another table, and a pass over it.
    """
    at = number[:, None] - numbers[:1]
    return at.clamp(0, max(len(numbers) - 1, 0)), (at >= 0) & (at < len(numbers))


def _to_others(a: Tensor, number: Tensor, b: Tensor, numbers: Tensor) -> tuple[Tensor, Tensors]:
    s = a @ b.T
    at, here = _itself(number, numbers)
    added = torch.where(here, -torch.inf, 0).to(s.dtype)
    # A checkpoint that a compiler traces refuses changes in place.
    return s.scatter_add(1, at, added) if compiling() else s.scatter_add_(1, at, added), ()


def _exp_others(a: Tensor, x: Tensor, number: Tensor, b: Tensor, numbers: Tensor) -> Tensors:
    s, _ = _to_others(a, number, b, numbers)
    return ((s - x[:, None]).exp().sum(1),)


EXP_OTHERS = ExpKernel(
    _exp_others, Counts(3, 2, 0), Counts(1, 0, 0), (True, False, False, True, False), _to_others
)
"""exp(s - x_i) summed over a row, without the pairs of a sample with itself; `number` identifies a sample."""


def _to_labelled(
    a: Tensor, number: Tensor, label: Tensor, b: Tensor, numbers: Tensor, labels: Tensor
) -> tuple[Tensor, Tensors]:
    """The similarities to others; the sum of those of the same label, and their number."""
    s, _ = _to_others(a, number, b, numbers)
    at, here = _itself(number, numbers)
    positive = label[:, None] == labels
    positive = positive.scatter(1, at, positive.gather(1, at) & ~here)
    return s, (torch.where(positive, s, 0).sum(1), positive.sum(1))


def _exp_labelled(a: Tensor, x: Tensor, *others: Tensor) -> Tensors:
    s, (positives, _) = _to_labelled(a, *others)
    return (s - x[:, None]).exp().sum(1), positives


EXP_LABELLED = ExpKernel(
    _exp_labelled,
    Counts(4, 3, 0),
    Counts(2, 0, 0),
    (True, False, False, False, True, False, False),
    _to_labelled,
)
"""`EXP_OTHERS`, and the similarities to other samples of the same label, summed over a row."""


def _sigmoid(a: Tensor, b: Tensor, bias: Tensor) -> Tensors:
    return (softplus(a @ b.T + bias).sum(),)


SIGMOID = Kernel(_sigmoid, Counts(1, 1, 1), Counts(0, 0, 1), (True, True, True))
"""log(1 + exp(s + bias)), summed over all pairs."""


def adjoint(of: Kernel, wanted: Sequence[bool]) -> Kernel:
    """The vector-Jacobian product, for the wanted operands; each group has its operands, then the cotangents."""
    counts = _added(of.counts, of.outputs)

    def run(*operands: Tensor) -> Tensors:
        given, cotangents = _separated(operands, of.counts, counts)
        changing = [x for x, is_wanted in zip(given, wanted, strict=True) if is_wanted]
        found: Tensors = vjp(_of_some(of, given, wanted), *changing)[1](cotangents)
        return found

    flags = _joined(of.differentiated, of.counts, [True] * sum(of.outputs), of.outputs)
    return Kernel(run, counts, _chosen(wanted, of.counts), tuple(flags))


def tangent(of: Kernel, moved: Sequence[bool]) -> Kernel:
    """The Jacobian-vector product, for the operands that move; each group has its operands, then their tangents.

    Computed as the adjoint of the adjoint: torch does not nest forward mode, and the caller may be using it.
    """
    moving = _chosen(moved, of.counts)
    counts = _added(of.counts, moving)

    def run(*operands: Tensor) -> Tensors:
        given, tangents = _separated(operands, of.counts, counts)
        changing = [x for x, moves in zip(given, moved, strict=True) if moves]
        kernel = _of_some(of, given, moved)

        def pulled(*cotangents: Tensor) -> Tensors:
            found: Tensors = vjp(kernel, *changing)[1](cotangents)
            return found

        like = [torch.zeros_like(y) for y in kernel(*changing)]
        found: Tensors = vjp(pulled, *like)[1](tangents)
        return found

    flags = _joined(of.differentiated, of.counts, [True] * sum(moving), moving)
    return Kernel(run, counts, of.outputs, tuple(flags))


def batched(of: Kernel, has: Sequence[bool]) -> Kernel:
    """A vmapped kernel; row and column operands that are batched have the batch in dim 1, shared ones in dim 0."""
    lines = of.counts.rows + of.counts.cols
    dims = tuple(int(i < lines) if is_batched else None for i, is_batched in enumerate(has))
    lines = of.outputs.rows + of.outputs.cols
    out_dims = tuple(int(i < lines) for i in range(sum(of.outputs)))
    return replace(of, run=torch.vmap(of.run, in_dims=dims, out_dims=out_dims))


def _of_some(kernel: Kernel, operands: Sequence[Tensor], changing: Sequence[bool]) -> Callable[..., Tensors]:
    """A kernel as a function of some of its operands."""

    def run(*given: Tensor) -> Tensors:
        others = iter(given)
        return kernel.run(*(next(others) if c else x for x, c in zip(operands, changing, strict=True)))

    return run


@dataclass(frozen=True)
class TileWork:
    """A sum over tiles; `ring` sends the columns of all ranks around, unless they are all here."""

    kernel: Kernel
    tile: int
    ring: RingPass | None = None

    def derived(self, kernel: Kernel) -> TileWork:
        """The sum of a derivative of the kernel."""
        return TileWork(kernel, self.tile, None if self.ring is None else self.ring.derived())


def runs(n: int, tile: int) -> Iterator[slice]:
    """The tiles of n rows; one empty tile if n is 0."""
    return (slice(at, min(at + tile, n)) for at in range(0, max(n, 1), tile))


def tiled_sum(job: TileWork, *operands: Tensor) -> Tensors:
    """The kernel's outputs, summed over the tiles, not differentiable."""
    rows, cols, shared = grouped(operands, job.kernel.counts)
    kept = job.kernel.outputs
    parts: list[list[Tensor]] = []
    columns: list[Tensor] = []
    totals: list[Tensor] = []
    with torch.autocast(rows[0].device.type, enabled=False):
        for here in runs(len(rows[0]), job.tile):
            mine = [upcast(x[here]) for x in rows]
            sums: list[Tensor] = []
            for there in runs(len(cols[0]), job.tile):
                found = job.kernel.run(*mine, *(upcast(x[there]) for x in cols), *map(upcast, shared))
                of_rows, of_cols, of_all = grouped(found, kept)
                sums = _add(sums, of_rows)
                totals = _add(totals, of_all)
                if not columns:
                    columns = [y.new_zeros(len(cols[0]), *y.shape[1:]) for y in of_cols]
                for column, y in zip(columns, of_cols, strict=True):
                    column[there] += y
            parts.append(sums)
    of_rows = tuple(torch.cat(each) for each in zip(*parts, strict=True))
    return (*of_rows, *columns, *totals)


def _add(sums: list[Tensor], more: Sequence[Tensor]) -> list[Tensor]:
    """Add in place; the first terms are copied."""
    if not sums:
        return [x.clone(memory_format=torch.contiguous_format) for x in more]
    return [total.add_(x) for total, x in zip(sums, more, strict=True)]


def ring_sum(job: TileWork, ring: RingPass, operands: Sequence[Tensor]) -> Tensors:
    """`tiled_sum` of this rank's rows over all ranks' columns, and of this rank's columns over all rows."""
    rows, cols, shared = grouped(operands, job.kernel.counts)
    sums: list[Tensor] = []
    counts = job.kernel.outputs

    def work(current: Sequence[Tensor]) -> Tensors:
        of_rows, of_cols, of_all = grouped(tiled_sum(job, *rows, *current, *shared), counts)
        more = (*of_rows, *of_all)
        sums[:] = [a.add_(b) for a, b in zip(sums, more, strict=True)] if sums else more
        return of_cols

    local = ring.travel(cols, work, torch.add)
    return (*sums[: counts.rows], *local, *sums[counts.rows :])


def table_sum(job: TileWork, operands: Sequence[Tensor], known: Sequence[Tensor] = ()) -> Tensors:
    """The kernel's outputs, summed over the tiles, differentiably; `known` outputs are not computed again.

    With a ring, every rank takes part in the backward, whether its operands require grad or not.
    """
    if job.ring is None and compiling():
        return _traced(job, operands)
    known = () if must_decompose() else known
    anchor = None if job.ring is None else torch.zeros(1, requires_grad=True)
    found: Tensors = _TableSum.apply(job, len(known), anchor, *known, *operands)  # type: ignore[no-untyped-call]
    return found


class _TableSum(torch.autograd.Function):
    """A sum over tiles; each of its derivatives is one too."""

    @staticmethod
    def forward(job: TileWork, known: int, anchor: Tensor | None, *tensors: Tensor) -> Tensors:  # noqa: ARG004
        if known:
            return tuple(y.clone() for y in tensors[:known])
        return tiled_sum(job, *tensors) if job.ring is None else ring_sum(job, job.ring, tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:  # noqa: ARG004
        ctx.job, ctx.known, _, *tensors = inputs
        ctx.save_for_backward(*tensors[ctx.known :])
        ctx.save_for_forward(*tensors[ctx.known :])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        job, kernel, operands = ctx.job, ctx.job.kernel, ctx.saved_tensors
        wanted = kernel.differentiated
        if job.ring is None:  # else other ranks need the gradients of their columns
            needed = ctx.needs_input_grad[3 + ctx.known :]
            wanted = tuple(n and d for n, d in zip(needed, wanted, strict=True))
        none = [None] * (3 + ctx.known)
        if not any(wanted):
            return (*none, *(None for _ in operands))
        inputs = _joined(operands, kernel.counts, grads, kernel.outputs)
        found = iter(table_sum(job.derived(adjoint(kernel, wanted)), inputs))
        given = (
            next(found).to(x.dtype) if is_wanted else None
            for x, is_wanted in zip(operands, wanted, strict=True)
        )
        return (*none, *given)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensors:
        job, kernel, operands = ctx.job, ctx.job.kernel, ctx.saved_tensors
        given = list(tangents[3 + ctx.known :])
        moved = kernel.differentiated
        if job.ring is None:
            moved = tuple(t is not None and d for t, d in zip(given, moved, strict=True))
        along = [
            torch.zeros_like(x) if t is None else t
            for x, t, m in zip(operands, given, moved, strict=True)
            if m
        ]
        inputs = _joined(operands, kernel.counts, along, _chosen(moved, kernel.counts))
        return table_sum(job.derived(tangent(kernel, moved)), inputs)

    @staticmethod
    def vmap(
        _: Any,
        in_dims: tuple[int | None, ...],
        job: TileWork,
        known: int,
        __: Tensor | None,
        *tensors: Tensor,
    ) -> Any:
        operands, dims = tensors[known:], in_dims[3 + known :]
        cut = job.kernel.counts.rows + job.kernel.counts.cols
        moved = [
            x if dim is None else x.movedim(dim, int(i < cut))
            for i, (x, dim) in enumerate(zip(operands, dims, strict=True))
        ]
        kernel = batched(job.kernel, [dim is not None for dim in dims])
        found = table_sum(replace(job, kernel=kernel), moved)
        cut = job.kernel.outputs.rows + job.kernel.outputs.cols
        return found, tuple(int(i < cut) for i in range(len(found)))


def _traced(job: TileWork, operands: Sequence[Tensor]) -> Tensors:
    """`table_sum` under torch.compile: each tile is a checkpoint, which the compiler supports."""
    rows, cols, shared = grouped(operands, job.kernel.counts)
    kept = job.kernel.outputs
    of_rows: list[list[Tensor]] = []
    of_cols: list[list[Tensor]] = []
    totals: list[Tensor] = []
    for here in runs(len(rows[0]), job.tile):
        sums: list[Tensor] = []
        of_tile: list[Tensor] = []
        for there in runs(len(cols[0]), job.tile):
            tile = [*(x[here] for x in rows), *(x[there] for x in cols), *shared]
            with torch.autocast(tile[0].device.type, enabled=False):
                found = checkpoint(job.kernel.run, *map(upcast, tile), use_reentrant=False)
            each = grouped(found, kept)
            sums = [a + b for a, b in zip(sums, each[0], strict=True)] if sums else list(each[0])
            totals = [a + b for a, b in zip(totals, each[2], strict=True)] if totals else list(each[2])
            of_tile.extend(each[1])
        of_rows.append(sums)
        of_cols.append(of_tile)
    whole = [torch.cat(each) for each in zip(*of_rows, strict=True)]
    lines = [sum(each) for each in zip(*of_cols, strict=True)]
    columns = [torch.cat(lines[k :: kept.cols]) for k in range(kept.cols)]
    return (*whole, *columns, *totals)


def log_sums(
    kernel: ExpKernel, rows: Sequence[Tensor], cols: Sequence[Tensor], tile: int, *, columns: bool
) -> tuple[Tensor, Tensor | None, Tensors]:
    """The logsumexp of each row and, with `columns`, of each column, and other sums over rows, not differentiable."""
    down, across = list(runs(len(rows[0]), tile)), list(runs(len(cols[0]), tile))
    # Allocate results first: small ones between the tiles would fragment the heap, and memory would grow.
    with torch.autocast(rows[0].device.type, enabled=False):
        like, _ = kernel.logits(*(upcast(x[:0]) for x in rows), *(upcast(x[:0]) for x in cols))
    of_rows = like.new_empty(len(rows[0]))
    of_cols = of_rows.new_empty(len(down), len(cols[0]) if columns else 0)
    parts = of_rows.new_empty(len(across), min(tile, len(rows[0])))
    others: list[list[Tensor]] = []
    with torch.autocast(rows[0].device.type, enabled=False):
        for i, here in enumerate(down):
            mine = [upcast(x[here]) for x in rows]
            sums: list[Tensor] = []
            for part, there in zip(parts, across, strict=True):
                s, more = kernel.logits(*mine, *(upcast(x[there]) for x in cols))
                part[: len(s)] = log_sum(s, 1)
                sums = _add(sums, more)
                if columns:
                    of_cols[i, there] = log_sum(s, 0)
            of_rows[here] = log_sum(parts[:, : len(mine[0])], 0)
            others.append(sums)
    more = tuple(torch.cat(each) for each in zip(*others, strict=True))
    return of_rows, log_sum(of_cols, 0) if columns else None, more


def log_sum(x: Tensor, dim: int) -> Tensor:
    """Logsumexp along a dim, differentiably; -inf if the dim is empty."""
    if x.shape[dim] > 1:
        return x.logsumexp(dim)
    # Of one entry it is the entry; the gradient of logsumexp is NaN if that is -inf.
    return x.sum(dim) if x.shape[dim] else x.sum(dim) - torch.inf


OfColumns = Callable[[Sequence[Tensor]], Sequence[Tensor]]
Combined = Callable[[Tensor, Tensor], Tensor]


class _LossCounter:
    """Number of ring losses of this rank so far."""

    number = 0


@dataclass(frozen=True)
class RingPass:
    """Sends the columns of one loss around the ring; `number` identifies the loss, the same on every rank."""

    axis: Axis
    sizes: tuple[int, ...]
    comm_dtype: torch.dtype | None
    backward_dtype: torch.dtype | None
    number: int
    order: int = 0  # the order of the derivative

    @classmethod
    def create(
        cls,
        axis: Axis,
        sizes: tuple[int, ...],
        comm_dtype: torch.dtype | None,
        backward_dtype: torch.dtype | None,
    ) -> RingPass:
        """The pass of a new loss; its number is one more than the largest of any rank."""
        counter = rank_state().get_or_create(_LossCounter)
        numbers = all_gather(constants([counter.number], exchange_device(axis)), axis)
        counter.number = max(to_list(numbers)) + 1
        return cls(axis, sizes, comm_dtype, backward_dtype, counter.number)

    def derived(self) -> RingPass:
        """The pass of a derivative."""
        return replace(self, order=self.order + 1)

    def travel(self, cols: Tensors, work: OfColumns, combine: Combined) -> list[Tensor]:
        """Send the columns around; `work` computes sums over this rank's rows. Returns the sums over all rows."""
        if self.axis.size > 1:
            self._agree(cols)
        back = self.backward_dtype if self.order else None

        def send(hop: int, columns: Sequence[Tensor]) -> list[Callable[[], Tensor]]:
            # The embeddings come first.
            return [self._send(x, None if i else self.comm_dtype, hop) for i, x in enumerate(columns)]

        def send_sums(hop: int, sums: Sequence[Tensor]) -> list[Callable[[], Tensor]]:
            return [self._send(x, back, hop) for x in sums]

        return travel(self.axis.size, cols, lambda _, columns: work(columns), combine, send, send_sums)

    def _send(self, x: Tensor, dtype: torch.dtype | None, hop: int) -> Callable[[], Tensor]:
        """Start sending the current block to the preceding rank."""
        sizes = (*self.sizes[hop:], *self.sizes[:hop])
        return shift(x, self.axis, -1, sizes=sizes, comm_dtype=dtype, async_op=True).wait

    def _agree(self, cols: Tensors) -> None:
        """Compare the ranks' columns before they are sent.

        A synchronous call reports another rank's error before async calls are pending. It also distinguishes the
        derivatives of two losses, which the ring's calls do not.
        """
        operand_desc = ", ".join(f"{str(x.dtype)[6:]}{list(x.shape[1:])}" for x in cols)
        signature = f"derivative {self.order} of loss {self.number}, of columns {operand_desc}"
        all_gather(Packed(cols[0].new_zeros(1), signature), self.axis)  # type: ignore[call-overload]


class LogSums(NamedTuple):
    """Logsumexp values, without derivatives."""

    rows: Tensor
    columns: Tensor  # distributed like the result of `Layout.spread`; empty if not requested
    known: Tensors  # this rank's part of the sums of exp(s - logsumexp), over rows and over columns
    more: Tensors  # the kernel's other sums over rows


class Layout(ABC):
    """The distribution of the table."""

    @abstractmethod
    def spread(self, x: Tensor) -> Tensor:
        """Distribute this rank's columns as `total` needs them."""

    @abstractmethod
    def local(self, x: Tensor) -> Tensor:
        """This rank's columns; inverse of `spread`."""

    @abstractmethod
    def log_sums(
        self, kernel: ExpKernel, rows: Sequence[Tensor], cols: Sequence[Tensor], *, columns: bool
    ) -> LogSums:
        """The logsumexp of each row of logits and, with `columns`, of each column."""

    @abstractmethod
    def total(self, kernel: Kernel, operands: Sequence[Tensor], known: Sequence[Tensor] = ()) -> Tensors:
        """A kernel's outputs summed over the full table: of this rank's rows, of its columns, and its shared part."""

    def logs(
        self, kernel: ExpKernel, rows: Sequence[Tensor], cols: Sequence[Tensor], *, columns: bool
    ) -> tuple[Tensor, Tensor, Tensors]:
        """`log_sums`, differentiably: of this rank's rows and columns, and the kernel's other sums over rows."""
        with torch.no_grad():
            sums = self.log_sums(
                kernel, [x.detach() for x in rows], [x.detach() for x in cols], columns=columns
            )
        empty = sums.rows == -torch.inf  # NaN rows stay NaN
        of_rows, of_cols = sums.rows.masked_fill(empty, 0), [sums.columns] if columns else []
        # logsumexp = constant + log(sum exp(s - constant)); the sum has value 1 and all derivatives.
        operands = (rows[0], of_rows, *rows[1:], *cols, *of_cols)
        others = kernel.outputs.rows - 1
        known = (sums.known[0], *sums.more[:others], *sums.known[1:])
        row_sums, *found = self.total(kernel, operands, known)
        logs = (of_rows + row_sums.masked_fill(empty, 1).log()).masked_fill(empty, -torch.inf)
        local = self.local(sums.columns) + found[others].log() if columns else sums.columns
        return logs, local, (*found[:others], *sums.more[others:])


@dataclass(frozen=True)
class Gathered(Layout):
    """Every rank has all columns, gathered by differentiable verbs.

    A table of one tile is saved for backward; with more tiles, backward recomputes them.
    """

    axis: Axis
    sizes: tuple[int, ...] | None  # each rank's number of columns; None: all the same
    tile: int
    comm_dtype: torch.dtype | None = None
    backward_dtype: torch.dtype | None = None

    @override
    def spread(self, x: Tensor) -> Tensor:
        if not x.is_floating_point():
            return all_gather(x, self.axis, sizes=self.sizes)
        return all_gather(
            x, self.axis, sizes=self.sizes, comm_dtype=self.comm_dtype, backward_dtype=self.backward_dtype
        )

    @override
    def local(self, x: Tensor) -> Tensor:
        each = self.sizes or (len(x) // self.axis.size,) * self.axis.size
        return x[self.axis.slice(each)]

    @override
    def log_sums(
        self, kernel: ExpKernel, rows: Sequence[Tensor], cols: Sequence[Tensor], *, columns: bool
    ) -> LogSums:
        of_rows, part, more = log_sums(kernel, rows, cols, self.tile, columns=columns)
        ones = of_rows.isfinite().to(of_rows.dtype)
        if part is None:
            return LogSums(of_rows, of_rows[:0], (ones,), more)
        full = all_reduce(part, self.axis, op="logsumexp", dst=R)  # one number for each column
        return LogSums(of_rows, full, (ones, (part - full).exp()), more)

    @override
    def total(self, kernel: Kernel, operands: Sequence[Tensor], known: Sequence[Tensor] = ()) -> Tensors:
        given = grouped(operands, kernel.counts)
        if self._is_one_tile(given[0], given[1]):
            with torch.autocast(operands[0].device.type, enabled=False):
                found = kernel.run(*map(upcast, operands))
        else:
            found = table_sum(TileWork(kernel, self.tile), operands, known)
        rows, cols, shared = grouped(found, kernel.outputs)
        local = [reduce_scatter(y, self.axis, sizes=self.sizes) for y in cols]
        return (*rows, *local, *shared)

    @override
    def logs(
        self, kernel: ExpKernel, rows: Sequence[Tensor], cols: Sequence[Tensor], *, columns: bool
    ) -> tuple[Tensor, Tensor, Tensors]:
        # The communication is the same for one tile and for several.
        if not self._is_one_tile(rows, cols):
            return super().logs(kernel, rows, cols, columns=columns)
        with torch.autocast(rows[0].device.type, enabled=False):
            s, more = kernel.logits(*map(upcast, rows), *map(upcast, cols))
        of_rows = log_sum(s, 1)
        if not columns:
            return of_rows, of_rows[:0], more
        part = log_sum(s, 0)
        with torch.no_grad():
            full = all_reduce(part.detach(), self.axis, op="logsumexp", dst=R)
        local = reduce_scatter((part - full).exp(), self.axis, sizes=self.sizes)
        return of_rows, self.local(full) + local.log(), more

    def _is_one_tile(self, rows: Sequence[Tensor], cols: Sequence[Tensor]) -> bool:
        return max(len(rows[0]), len(cols[0])) <= self.tile


@dataclass(frozen=True)
class Passed(Layout):
    """The columns travel around the ring of ranks; their values and sums return to their rank."""

    tile: int
    ring: RingPass

    @override
    def spread(self, x: Tensor) -> Tensor:
        return x

    @override
    def local(self, x: Tensor) -> Tensor:
        return x

    @override
    def log_sums(
        self, kernel: ExpKernel, rows: Sequence[Tensor], cols: Sequence[Tensor], *, columns: bool
    ) -> LogSums:
        found: list[Tensor] = []

        def work(current: Sequence[Tensor]) -> list[Tensor]:
            of_rows, of_cols, more = log_sums(kernel, rows, current, self.tile, columns=columns)
            if found:
                of_rows = torch.logaddexp(found[0], of_rows)
                more = tuple(a + b for a, b in zip(found[1:], more, strict=True))
            found[:] = [of_rows, *more]
            return [] if of_cols is None else [of_cols]

        local = self.ring.travel(tuple(cols), work, torch.logaddexp)
        of_rows, *more = found
        ones = tuple(y.isfinite().to(y.dtype) for y in (of_rows, *local))
        return LogSums(of_rows, local[0] if local else of_rows[:0], ones, tuple(more))

    @override
    def total(self, kernel: Kernel, operands: Sequence[Tensor], known: Sequence[Tensor] = ()) -> Tensors:
        return table_sum(TileWork(kernel, self.tile, self.ring), operands, known)


Gather = Literal["all", "ring"]
Number = float | Tensor

_ON_CPU, _ELSEWHERE = 1024, 4096
"""Default rows and columns of a tile: it fits a CPU's caches, and keeps an accelerator busy."""

_WHOLE_ON_CPU, _WHOLE_ELSEWHERE = 2**22, 2**24
"""Up to this number of entries, a rank's rows of the table are one tile by default."""


class LossInputs:
    """Checked arguments of a loss over the samples of all ranks.

    The samples have one shape and dtype; `numbers`, such as a scale, are the same on every rank.
    """

    def __init__(
        self,
        op: str,
        samples: Mapping[str, Tensor],
        numbers: Mapping[str, Number],
        axis: AxisLike,
        sizes: SizesLike,
        dst: Convention,
        gather: Gather = "all",
        tile: int | None = None,
        *,
        dims: tuple[int, ...] = (2,),
        extra: str = "",
    ) -> None:
        """Check the arguments and, with sizes="auto", exchange the sizes, and compare the numbers and `extra`."""
        first = next(iter(samples.values()))
        self.op = op
        self.call = call = Call(op, first, axis)
        self.axis: Axis = call.axis
        self._dst: Convention = call.choose("dst", dst, {R: R, I: I})
        for name, x in samples.items():
            self._check(name, x, first, dims)
        self._gather = call.choose("gather", gather, {"all": "all", "ring": "ring"})
        self._tile = self._size(tile)
        self.rows: int = first.shape[0]  # this rank's number of samples
        self.numbers = {name: self._number(name, value) for name, value in numbers.items()}
        self.sizes = self._counted(first, sizes, f"gather={gather!r}{extra}")  # None: all the same
        self.total: int = self.rows * self.axis.size if self.sizes is None else sum(self.sizes)
        if self.total == 0:  # every rank raises
            raise ArgumentError.of(
                "cannot compute the mean over zero samples",
                op=op,
                axis=str(self.axis),
                expected="at least 1 sample over all ranks",
                got="no samples on any rank",
                remedy="skip this step on every rank",
            )

    def _check(self, name: str, x: object, first: Tensor, dims: tuple[int, ...]) -> None:
        if not isinstance(x, Tensor) or x.dim() not in dims or not x.is_floating_point():
            got = f"{x.dtype} of shape {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            self.call.fail(
                f"{name} is not a floating-point tensor with {' or '.join(map(str, dims))} dimensions",
                expected="embeddings of shape (samples, features)"
                + (" or (samples, views, features)" if 3 in dims else ""),
                got=got,
                remedy="reshape it, e.g. x.flatten(1), and convert it, e.g. x.float()",
                kind=ShapeError,
            )
        if (x.shape, x.dtype, x.device) != (first.shape, first.dtype, first.device):
            self.call.fail(
                f"{name} does not match the other embeddings",
                expected=f"{first.dtype} of shape {list(first.shape)} on {first.device}",
                got=f"{x.dtype} of shape {list(x.shape)} on {x.device}",
                remedy="pass one row for each sample in both"
                if x.shape != first.shape
                else f"convert it to {first.dtype} on {first.device}",
                kind=ShapeError,
            )

    def _counted(self, first: Tensor, sizes: SizesLike, extra: str) -> tuple[int, ...] | None:
        if sizes != "auto" or isinstance(sizes, Tensor):
            given = self.call.sizes(sizes, 0)
            if given.equal:
                return None
            each = tuple(given.explicit)
            check_own_size(self.call, each, self.rows, "samples")
            return each
        self.call.refuse_compiled(
            'sizes="auto" is not supported in a compiled program', "sizes=None, or e.g. sizes=(4, 3)"
        )
        signature = f"{self.call.verb} of {first.dtype} with {list(first.shape[1:])} features, {extra}"
        # Counts and numbers travel in one message; float64 represents both exactly.
        device = exchange_device(self.axis, first)
        dtype = torch.float32 if device.type == "mps" else torch.float64
        numbers = {} if transforms_active() else self.numbers
        # The host would have to wait for a number on a device; NaN is not compared.
        local = [
            torch.as_tensor(
                math.nan if isinstance(x, Tensor) and not x.is_cpu else x, dtype=dtype, device="cpu"
            )
            for x in (self.rows, *numbers.values())
        ]
        row = torch.stack(local).detach()[None].to(device, non_blocking=True)
        found = all_gather(Packed(row, signature), self.axis)  # type: ignore[call-overload]
        counts, *columns = zip(*to_list(found), strict=True)
        for name, of_ranks in zip(numbers, columns, strict=True):
            self._same(name, of_ranks)
        return tuple(map(int, counts))

    def _same(self, name: str, of_ranks: Sequence[float]) -> None:
        """Raise if a number differs between ranks by more than rounding and a few training steps explain."""
        low, high = min(of_ranks), max(of_ranks)
        if high - low > 0.01 * max(abs(low), abs(high), 1e-6):
            raise MismatchError.of(
                f"{name} differs between the ranks",
                op=self.op,
                axis=str(self.axis),
                expected=f"the same {name} on every rank: each rank computes a part of one loss",
                got="\n".join(f"rank {rank}: {name}={value:g}" for rank, value in enumerate(of_ranks)),
                remedy="initialize it with the same value on every rank; if it is learned, make it a parameter of "
                "the module that DDP or FSDP wraps, so that its gradients are averaged",
            )

    def _size(self, tile: int | None) -> int | None:
        if tile is None:
            return None
        whole = integer(tile)
        if whole is None or whole < 1:
            self.call.fail(
                "tile must be a positive int or None",
                expected="e.g. tile=1024, the number of rows and columns in memory at once",
                got=f"tile={tile!r}",
                remedy="omit it for the default",
            )
        return whole

    def layout(
        self, comm_dtype: torch.dtype | None, backward_dtype: torch.dtype | None, views: int = 1
    ) -> Layout:
        """The table of all pairs, with `views` rows for each sample."""
        sizes = None if self.sizes is None else tuple(n * views for n in self.sizes)
        each = sizes or (self.rows * views,) * self.axis.size
        tile, on_cpu = self._tile, self.call.x.is_cpu
        if tile is None:
            entries = max(each) * sum(each)
            tile = _ON_CPU if on_cpu else _ELSEWHERE
            if entries <= (_WHOLE_ON_CPU if on_cpu else _WHOLE_ELSEWHERE):
                tile = max(tile, sum(each))
        if self._gather == "all" or compiling():
            return Gathered(self.axis, sizes, tile, comm_dtype, backward_dtype)
        return Passed(tile, RingPass.create(self.axis, each, comm_dtype, backward_dtype))

    def _number(self, name: str, value: Number) -> Number:
        one = isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex()
        if not one and (isinstance(value, bool) or not isinstance(value, (int, float))):
            self.call.fail(
                f"{name} is not a real number",
                expected="a float, or a real tensor of one element",
                got=f"{name}={value!r}"
                if not isinstance(value, Tensor)
                else f"a {value.dtype} tensor of shape {list(value.shape)}",
                remedy=f"pass e.g. {name}=10.0",
            )
        return value.reshape(()) if isinstance(value, Tensor) else value

    def mean(self, share: Tensor, over: int | None = None) -> Tensor:
        """The mean over all samples, from this rank's sum."""
        return all_reduce(share / (over or self.total), self.axis, dst=self._dst)
