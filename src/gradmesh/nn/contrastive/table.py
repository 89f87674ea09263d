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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.func import vjp
from torch.nn.functional import softplus
from torch.utils.checkpoint import checkpoint

from gradmesh._torch import transforms_active
from gradmesh._util.structure import Packed
from gradmesh.errors import ArgumentError, MismatchError, ShapeError, message
from gradmesh.nn.inputs import check_own_size, upcast
from gradmesh.nn.ring import travel
from gradmesh.runtime.mesh import Axis, AxisLike
from gradmesh.runtime.state import must_decompose, rank_state
from gradmesh.transport import compiling
from gradmesh.transport.run import constants, exchange_device
from gradmesh.types import Convention, I, R
from gradmesh.verbs.call import Call, SizesLike, integer
from gradmesh.verbs.collectives import all_gather, all_reduce, reduce_scatter, shift

Tensors = tuple[Tensor, ...]


class Counts(NamedTuple):
    """Number of tensors of each group."""

    rows: int
    cols: int
    shared: int


class Logits(Protocol):
    """Computes the logits of one tile."""

    def logits(self, *operands: Any, **_: Any) -> tuple[Tensor, Tensors]:
        """The logits, and other quantities that are summed over each row."""


class Kernel(Protocol):
    """The computation of one tile."""

    def __call__(self, *operands: Any, **_: Any) -> Tensors:
        """The outputs of a tile: of rows, of columns, shared."""

    @property
    def counts(self) -> Counts:
        """Number of operands."""

    @property
    def outputs(self) -> Counts:
        """Number of outputs."""

    @property
    def differentiated(self) -> tuple[bool, ...]:
        """Which operands are differentiable."""


def grouped(tensors: Sequence[Tensor], counts: Counts) -> tuple[Tensors, Tensors, Tensors]:
    """Split tensors into their groups."""
    rows, cols = counts.rows, counts.rows + counts.cols
    return tuple(tensors[:rows]), tuple(tensors[rows:cols]), tuple(tensors[cols:])


def similarity(a: Tensor, b: Tensor) -> Tensor:
    """The inner products of rows."""
    return a @ b.T


@dataclass(frozen=True)
class ExpBoth:
    """exp(s - x_i) summed over a row and exp(s - y_j) summed over a column, of the similarities s."""

    counts = Counts(2, 2, 0)
    outputs = Counts(1, 1, 0)
    differentiated = (True, False, True, False)

    def logits(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensors]:
        """The similarities."""
        return similarity(a, b), ()

    def __call__(self, a: Tensor, x: Tensor, b: Tensor, y: Tensor) -> Tensors:
        """Both sums."""
        s = similarity(a, b)
        return (s - x[:, None]).exp().sum(1), (s - y).exp().sum(0)


@dataclass(frozen=True)
class ExpOthers:
    """exp(s - x_i) summed over a row, without the pairs of a sample with itself; `number` identifies a sample."""

    counts = Counts(3, 2, 0)
    outputs = Counts(1, 0, 0)
    differentiated = (True, False, False, True, False)

    def logits(self, a: Tensor, number: Tensor, b: Tensor, numbers: Tensor) -> tuple[Tensor, Tensors]:
        """The similarities to others."""
        return torch.where(number[:, None] == numbers, -torch.inf, similarity(a, b)), ()

    def __call__(self, a: Tensor, x: Tensor, number: Tensor, b: Tensor, numbers: Tensor) -> Tensors:
        """The sum."""
        s, _ = self.logits(a, number, b, numbers)
        return ((s - x[:, None]).exp().sum(1),)


@dataclass(frozen=True)
class ExpLabelled:
    """`ExpOthers`, and the similarities to other samples of the same label, summed over a row."""

    counts = Counts(4, 3, 0)
    outputs = Counts(2, 0, 0)
    differentiated = (True, False, False, False, True, False, False)

    def logits(
        self, a: Tensor, number: Tensor, label: Tensor, b: Tensor, numbers: Tensor, labels: Tensor
    ) -> tuple[Tensor, Tensors]:
        """The similarities to others; the sum of those of the same label, and their number."""
        s, itself = similarity(a, b), number[:, None] == numbers
        positive = (label[:, None] == labels) & ~itself
        return torch.where(itself, -torch.inf, s), (torch.where(positive, s, 0).sum(1), positive.sum(1))

    def __call__(
        self, a: Tensor, x: Tensor, number: Tensor, label: Tensor, b: Tensor, numbers: Tensor, labels: Tensor
    ) -> Tensors:
        """Both sums."""
        s, (positives, _) = self.logits(a, number, label, b, numbers, labels)
        return (s - x[:, None]).exp().sum(1), positives


@dataclass(frozen=True)
class Sigmoid:
    """log(1 + exp(s + bias)), summed over all pairs."""

    counts = Counts(1, 1, 1)
    outputs = Counts(0, 0, 1)
    differentiated = (True, True, True)

    def __call__(self, a: Tensor, b: Tensor, bias: Tensor) -> Tensors:
        """The sum."""
        return (softplus(similarity(a, b) + bias).sum(),)


@dataclass(frozen=True)
class Adjoint:
    """The vector-Jacobian product of a kernel; each group has its operands, then its outputs' cotangents.

    Attributes:
        of: the kernel.
        wanted: the operands whose gradient is returned.
    """

    of: Kernel
    wanted: tuple[bool, ...]

    @property
    def counts(self) -> Counts:
        """The operands and the cotangents."""
        return _added(self.of.counts, self.of.outputs)

    @property
    def outputs(self) -> Counts:
        """The wanted gradients."""
        return Counts(*(sum(group) for group in _flags(self.wanted, self.of.counts)))

    @property
    def differentiated(self) -> tuple[bool, ...]:
        """Those of the kernel, and all cotangents."""
        return _with(self.of.differentiated, self.of, True)

    def __call__(self, *operands: Tensor) -> Tensors:
        """The gradients."""
        given, cotangents = _split(operands, self.of.counts, self.counts)
        wanted = [x for x, is_wanted in zip(given, self.wanted, strict=True) if is_wanted]
        found: Tensors = vjp(_of_wanted(self.of, given, self.wanted), *wanted)[1](cotangents)
        return found


@dataclass(frozen=True)
class Tangent:
    """The Jacobian-vector product of a kernel; each group has its operands, then the tangents of some.

    Computed as the adjoint of the adjoint: torch does not nest forward mode, and the caller may be using it.

    Attributes:
        of: the kernel.
        moved: the operands that have a tangent.
    """

    of: Kernel
    moved: tuple[bool, ...]

    @property
    def counts(self) -> Counts:
        """The operands and the tangents."""
        return _added(self.of.counts, Counts(*(sum(group) for group in _flags(self.moved, self.of.counts))))

    @property
    def outputs(self) -> Counts:
        """Those of the kernel."""
        return self.of.outputs

    @property
    def differentiated(self) -> tuple[bool, ...]:
        """Those of the kernel, and all tangents."""
        groups = zip(
            _flags(self.of.differentiated, self.of.counts), _flags(self.moved, self.of.counts), strict=True
        )
        return tuple(flag for flags, moved in groups for flag in (*flags, *[True] * sum(moved)))

    def __call__(self, *operands: Tensor) -> Tensors:
        """The outputs' tangents."""
        given, tangents = _split(operands, self.of.counts, self.counts)
        moving = [x for x, moves in zip(given, self.moved, strict=True) if moves]
        kernel = _of_wanted(self.of, given, self.moved)

        def pulled(*cotangents: Tensor) -> Tensors:
            found: Tensors = vjp(kernel, *moving)[1](cotangents)
            return found

        like = [torch.zeros_like(y) for y in kernel(*moving)]
        found: Tensors = vjp(pulled, *like)[1](tangents)
        return found


@dataclass(frozen=True)
class Batched:
    """A vmapped kernel; row and column operands have the batch in dim 1, shared ones in dim 0.

    Attributes:
        of: the kernel.
        has: the batched operands.
    """

    of: Kernel
    has: tuple[bool, ...]

    @property
    def counts(self) -> Counts:
        """Those of the kernel."""
        return self.of.counts

    @property
    def outputs(self) -> Counts:
        """Those of the kernel."""
        return self.of.outputs

    @property
    def differentiated(self) -> tuple[bool, ...]:
        """Those of the kernel."""
        return self.of.differentiated

    def __call__(self, *operands: Tensor) -> Tensors:
        """The outputs."""
        cut = self.counts.rows + self.counts.cols
        dims = tuple(int(i < cut) if batched else None for i, batched in enumerate(self.has))
        cut = self.outputs.rows + self.outputs.cols
        out_dims = tuple(int(i < cut) for i in range(sum(self.outputs)))
        found: Tensors = torch.vmap(self.of, in_dims=dims, out_dims=out_dims)(*operands)
        return found


def _of_wanted(kernel: Kernel, operands: Sequence[Tensor], wanted: Sequence[bool]) -> Callable[..., Tensors]:
    """A kernel as a function of some of its operands."""

    def run(*changing: Tensor) -> Tensors:
        others = iter(changing)
        return kernel(*(next(others) if w else x for x, w in zip(operands, wanted, strict=True)))

    return run


def _added(a: Counts, b: Counts) -> Counts:
    return Counts(*(x + y for x, y in zip(a, b, strict=True)))


def _flags(flags: Sequence[bool], counts: Counts) -> list[Sequence[bool]]:
    rows, cols = counts.rows, counts.rows + counts.cols
    return [flags[:rows], flags[rows:cols], flags[cols:]]


def _with(flags: Sequence[bool], of: Kernel, more: bool) -> tuple[bool, ...]:
    """The flags of a kernel's operands, and one more for each output, group by group."""
    groups = zip(_flags(flags, of.counts), of.outputs, strict=True)
    return tuple(flag for group, added in groups for flag in (*group, *[more] * added))


def _split(operands: Sequence[Tensor], first: Counts, both: Counts) -> tuple[Tensors, Tensors]:
    """Split each group into a kernel's operands and the rest (cotangents or tangents)."""
    groups = list(zip(grouped(operands, both), first, strict=True))
    given = tuple(x for group, n in groups for x in group[:n])
    return given, tuple(x for group, n in groups for x in group[n:])


@dataclass(frozen=True)
class TileWork:
    """A sum over tiles.

    Attributes:
        kernel: computes a tile.
        tile: the tile size.
        ring: sends the columns of all ranks around; None: the columns are all here.
    """

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
                found = job.kernel(*mine, *(upcast(x[there]) for x in cols), *map(upcast, shared))
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
        found = iter(table_sum(job.derived(Adjoint(kernel, wanted)), merged(kernel, operands, grads)))
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
        along = (
            torch.zeros_like(x) if t is None else t
            for x, t, m in zip(operands, given, moved, strict=True)
            if m
        )
        flags = iter(moved)
        groups = grouped(operands, kernel.counts)
        inputs = [x for group in groups for x in (*group, *[next(along) for _ in group if next(flags)])]
        return table_sum(job.derived(Tangent(kernel, moved)), inputs)

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
        batched = Batched(job.kernel, tuple(dim is not None for dim in dims))
        found = table_sum(replace(job, kernel=batched), moved)
        cut = job.kernel.outputs.rows + job.kernel.outputs.cols
        return found, tuple(int(i < cut) for i in range(len(found)))


def merged(kernel: Kernel, operands: Sequence[Tensor], more: Sequence[Tensor]) -> list[Tensor]:
    """A kernel's operands and tensors shaped like its outputs, group by group."""
    groups = zip(grouped(operands, kernel.counts), grouped(more, kernel.outputs), strict=True)
    return [x for group, added in groups for x in (*group, *added)]


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
                found = checkpoint(job.kernel, *map(upcast, tile), use_reentrant=False)
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
    kernel: Logits, rows: Sequence[Tensor], cols: Sequence[Tensor], tile: int, *, columns: bool
) -> tuple[Tensor, Tensor | None, Tensors]:
    """The logsumexp of each row and, with `columns`, of each column, not differentiable.

    Returns:
        The rows' values, the columns' values, and the kernel's other sums over rows.
    """
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
    return x.logsumexp(dim) if x.shape[dim] else x.sum(dim) - torch.inf


OfColumns = Callable[[Sequence[Tensor]], Sequence[Tensor]]
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
    ) -> RingPass:
        """The pass of a new loss; its number is one more than the largest of any rank."""
        counter = rank_state().get_or_create(_LossCounter)
        numbers = all_gather(constants([counter.number], exchange_device(axis)), axis)
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


def ring_log_sums(
    ring: RingPass,
    kernel: Logits,
    rows: Sequence[Tensor],
    cols: Sequence[Tensor],
    tile: int,
    *,
    columns: bool,
) -> tuple[Tensor, Tensor | None, Tensors]:
    """`log_sums` of this rank's rows over all ranks' columns, and of this rank's columns over all rows."""
    found: list[Tensor] = []

    def work(current: Sequence[Tensor]) -> list[Tensor]:
        of_rows, of_cols, more = log_sums(kernel, rows, current, tile, columns=columns)
        if found:
            of_rows = torch.logaddexp(found[0], of_rows)
            more = tuple(a + b for a, b in zip(found[1:], more, strict=True))
        found[:] = [of_rows, *more]
        return [] if of_cols is None else [of_cols]

    local = ring.travel(tuple(cols), work, torch.logaddexp)
    return found[0], local[0] if columns else None, tuple(found[1:])


@dataclass(frozen=True)
class LogSums:
    """Logsumexp values, without derivatives.

    Attributes:
        rows: of this rank's rows.
        columns: of the columns, distributed like the result of `Layout.spread`; empty if not requested.
        known: this rank's part of the sums of exp(s - logsumexp), over rows and over columns.
        more: the kernel's other sums over rows.
    """

    rows: Tensor
    columns: Tensor
    known: Tensors
    more: Tensors


class Layout(Protocol):
    """The distribution of the table."""

    def spread(self, x: Tensor) -> Tensor:
        """Distribute this rank's columns as `total` needs them."""

    def local(self, x: Tensor) -> Tensor:
        """This rank's columns; inverse of `spread`."""

    def log_sums(
        self, kernel: Logits, rows: Sequence[Tensor], cols: Sequence[Tensor], *, columns: bool
    ) -> LogSums:
        """The logsumexp of each row of logits and, with `columns`, of each column."""

    def total(self, kernel: Kernel, operands: Sequence[Tensor], known: Sequence[Tensor] = ()) -> Tensors:
        """A kernel's outputs summed over the full table: of this rank's rows, of its columns, and its shared part."""

    def logs(
        self, kernel: ExpKernel, rows: Sequence[Tensor], cols: Sequence[Tensor], *, columns: bool
    ) -> tuple[Tensor, Tensor, Tensors]:
        """`log_sums`, differentiably: of this rank's rows and columns, and the kernel's other sums over rows."""


class ExpKernel(Kernel, Logits, Protocol):
    """A kernel of exp(logits - x_i), summed over a row, and exp(logits - y_j), summed over a column."""


def _tiled_logs(
    table: Layout, kernel: ExpKernel, rows: Sequence[Tensor], cols: Sequence[Tensor], *, columns: bool
) -> tuple[Tensor, Tensor, Tensors]:
    """`Layout.logs` with one tile in memory at a time."""
    with torch.no_grad():
        sums = table.log_sums(kernel, [x.detach() for x in rows], [x.detach() for x in cols], columns=columns)
    empty = sums.rows == -torch.inf  # NaN rows stay NaN
    of_rows, of_cols = sums.rows.masked_fill(empty, 0), [sums.columns] if columns else []
    # logsumexp = constant + log(sum exp(s - constant)); the sum has value 1 and all derivatives.
    operands = (rows[0], of_rows, *rows[1:], *cols, *of_cols)
    others = kernel.outputs.rows - 1
    known = (sums.known[0], *sums.more[:others], *sums.known[1:])
    row_sums, *found = table.total(kernel, operands, known)
    logs = (of_rows + row_sums.masked_fill(empty, 1).log()).masked_fill(empty, -torch.inf)
    local = table.local(sums.columns) + found[others].log() if columns else sums.columns
    return logs, local, (*found[:others], *sums.more[others:])


@dataclass(frozen=True)
class Gathered:
    """Every rank has all columns, gathered by differentiable verbs.

    A table of one tile is saved for backward; with more tiles, backward recomputes them.

    Attributes:
        axis: the ranks.
        sizes: each rank's number of columns; None: all the same.
        tile: the tile size.
        comm_dtype: the dtype in which columns are sent.
        backward_dtype: the dtype in which their gradients are sent.
    """

    axis: Axis
    sizes: tuple[int, ...] | None
    tile: int
    comm_dtype: torch.dtype | None = None
    backward_dtype: torch.dtype | None = None

    def spread(self, x: Tensor) -> Tensor:
        """All ranks' columns."""
        if not x.is_floating_point():
            return all_gather(x, self.axis, sizes=self.sizes)
        return all_gather(
            x, self.axis, sizes=self.sizes, comm_dtype=self.comm_dtype, backward_dtype=self.backward_dtype
        )

    def local(self, x: Tensor) -> Tensor:
        """This rank's columns."""
        each = self.sizes or (len(x) // self.axis.size,) * self.axis.size
        return x[self.axis.slice(each)]

    def log_sums(
        self, kernel: Logits, rows: Sequence[Tensor], cols: Sequence[Tensor], *, columns: bool
    ) -> LogSums:
        """The columns' values are reduced over the ranks, one number for each column."""
        of_rows, part, more = log_sums(kernel, rows, cols, self.tile, columns=columns)
        ones = of_rows.isfinite().to(of_rows.dtype)
        if part is None:
            return LogSums(of_rows, of_rows[:0], (ones,), more)
        full = all_reduce(part, self.axis, op="logsumexp", dst=R)
        return LogSums(of_rows, full, (ones, (part - full).exp()), more)

    def total(self, kernel: Kernel, operands: Sequence[Tensor], known: Sequence[Tensor] = ()) -> Tensors:
        """The columns' sums are reduced to the rank that holds the column."""
        given = grouped(operands, kernel.counts)
        if self._is_one_tile(given[0], given[1]):
            with torch.autocast(operands[0].device.type, enabled=False):
                found = kernel(*map(upcast, operands))
        else:
            found = table_sum(TileWork(kernel, self.tile), operands, known)
        rows, cols, shared = grouped(found, kernel.outputs)
        local = [reduce_scatter(y, self.axis, sizes=self.sizes) for y in cols]
        return (*rows, *local, *shared)

    def logs(
        self, kernel: ExpKernel, rows: Sequence[Tensor], cols: Sequence[Tensor], *, columns: bool
    ) -> tuple[Tensor, Tensor, Tensors]:
        """A single tile's logits are saved for backward; the communication is the same either way."""
        if not self._is_one_tile(rows, cols):
            return _tiled_logs(self, kernel, rows, cols, columns=columns)
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
class Passed:
    """The columns travel around the ring of ranks.

    Attributes:
        axis: the ranks.
        sizes: each rank's number of columns.
        tile: the tile size.
        ring: sends the columns.
    """

    axis: Axis
    sizes: tuple[int, ...]
    tile: int
    ring: RingPass

    def spread(self, x: Tensor) -> Tensor:
        """The local columns, unchanged."""
        return x

    def local(self, x: Tensor) -> Tensor:
        """The local columns, unchanged."""
        return x

    def log_sums(
        self, kernel: Logits, rows: Sequence[Tensor], cols: Sequence[Tensor], *, columns: bool
    ) -> LogSums:
        """The columns' values return to their rank."""
        of_rows, of_cols, more = ring_log_sums(self.ring, kernel, rows, cols, self.tile, columns=columns)
        known = [of_rows] if of_cols is None else [of_rows, of_cols]
        ones = tuple(y.isfinite().to(y.dtype) for y in known)
        return LogSums(of_rows, of_rows[:0] if of_cols is None else of_cols, ones, more)

    def total(self, kernel: Kernel, operands: Sequence[Tensor], known: Sequence[Tensor] = ()) -> Tensors:
        """One pass around the ring; the sums of the columns return to their rank."""
        return table_sum(TileWork(kernel, self.tile, self.ring), operands, known)

    def logs(
        self, kernel: ExpKernel, rows: Sequence[Tensor], cols: Sequence[Tensor], *, columns: bool
    ) -> tuple[Tensor, Tensor, Tensors]:
        """Two passes around the ring."""
        return _tiled_logs(self, kernel, rows, cols, columns=columns)


Gather = Literal["all", "ring"]
Number = float | Tensor

_ON_CPU, _ELSEWHERE = 1024, 4096
"""Default rows and columns of a tile: it fits a CPU's caches, and keeps an accelerator busy."""

_WHOLE_ON_CPU, _WHOLE_ELSEWHERE = 2**22, 2**24
"""Up to this number of entries, a rank's rows of the table are one tile by default."""


class LossInputs:
    """Checked arguments of a loss over the samples of all ranks.

    Attributes:
        op: the name of the loss.
        axis: the ranks.
        rows: this rank's number of samples.
        sizes: each rank's number of samples; None: all the same.
        total: the number of samples of all ranks.
        numbers: the scale or temperature, and the bias.
    """

    def __init__(
        self,
        op: str,
        samples: Mapping[str, Tensor],
        axis: AxisLike,
        *,
        sizes: SizesLike,
        dst: Convention,
        gather: Gather = "all",
        tile: int | None = None,
        dims: tuple[int, ...] = (2,),
        numbers: Mapping[str, Number] | None = None,
        extra: str = "",
    ) -> None:
        """Check the arguments and, with sizes="auto", exchange the sizes.

        Args:
            op: the name of the loss.
            samples: its tensors by name, of one shape and dtype.
            axis: the ranks.
            sizes: as in verbs.
            dst: the type of the loss.
            gather: "all" or "ring".
            tile: the tile size; None: the default.
            dims: the allowed numbers of dimensions.
            numbers: real numbers that must be the same on every rank, such as a scale; compared if sizes="auto".
            extra: text that is appended to the signature that the ranks compare.
        """
        first = next(iter(samples.values()))
        self.op = op
        self._call = call = Call(op, first, axis)
        self.axis: Axis = call.axis
        self._dst: Convention = call.choose("dst", dst, {R: R, I: I})
        for name, x in samples.items():
            self._check(name, x, first, dims)
        self._gather = call.choose("gather", gather, {"all": "all", "ring": "ring"})
        self._tile = self._size(tile)
        self.rows: int = first.shape[0]
        self.numbers = {name: self._number(name, value) for name, value in (numbers or {}).items()}
        self.sizes = self._counted(first, sizes, f"gather={gather!r}{extra}")
        self.total: int = self.rows * self.axis.size if self.sizes is None else sum(self.sizes)
        if self.total == 0:  # every rank raises
            raise ArgumentError(
                message(
                    "cannot compute the mean over zero samples",
                    op=op,
                    axis=str(self.axis),
                    expected="at least 1 sample over all ranks",
                    got="no samples on any rank",
                    remedy="skip this step on every rank",
                )
            )

    def _check(self, name: str, x: object, first: Tensor, dims: tuple[int, ...]) -> None:
        if not isinstance(x, Tensor) or x.dim() not in dims or not x.is_floating_point():
            got = f"{x.dtype} of shape {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            self._call.fail(
                f"{name} is not a floating-point tensor with {' or '.join(map(str, dims))} dimensions",
                expected="embeddings of shape (samples, features)"
                + (" or (samples, views, features)" if 3 in dims else ""),
                got=got,
                remedy="reshape it, e.g. x.flatten(1), and convert it, e.g. x.float()",
                kind=ShapeError,
            )
        if (x.shape, x.dtype, x.device) != (first.shape, first.dtype, first.device):
            self._call.fail(
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
            given = self._call.sizes(sizes, 0)
            if given.equal:
                return None
            each = tuple(given.explicit)
            check_own_size(self._call, each, self.rows, "samples")
            return each
        self._call.refuse_compiled(
            'sizes="auto" is not supported in a compiled program', "sizes=None, or e.g. sizes=(4, 3)"
        )
        signature = f"{self._call.verb} of {first.dtype} with {list(first.shape[1:])} features, {extra}"
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
        counts, *columns = zip(*found.tolist(), strict=True)
        for name, of_ranks in zip(numbers, columns, strict=True):
            self._same(name, of_ranks)
        return tuple(map(int, counts))

    def _same(self, name: str, of_ranks: Sequence[float]) -> None:
        """Raise if a number differs between ranks by more than rounding and a few training steps explain."""
        low, high = min(of_ranks), max(of_ranks)
        if high - low > 0.01 * max(abs(low), abs(high), 1e-6):
            raise MismatchError(
                message(
                    f"{name} differs between the ranks",
                    op=self.op,
                    axis=str(self.axis),
                    expected=f"the same {name} on every rank: each rank computes a part of one loss",
                    got="\n".join(f"rank {rank}: {name}={value:g}" for rank, value in enumerate(of_ranks)),
                    remedy="initialize it with the same value on every rank; if it is learned, make it a parameter of "
                    "the module that DDP or FSDP wraps, so that its gradients are averaged",
                )
            )

    def _size(self, tile: int | None) -> int | None:
        if tile is None:
            return None
        whole = integer(tile)
        if whole is None or whole < 1:
            self._call.fail(
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
        tile, on_cpu = self._tile, self._call.x.is_cpu
        if tile is None:
            entries = max(each) * sum(each)
            tile = _ON_CPU if on_cpu else _ELSEWHERE
            if entries <= (_WHOLE_ON_CPU if on_cpu else _WHOLE_ELSEWHERE):
                tile = max(tile, sum(each))
        if self._gather == "all" or compiling():
            return Gathered(self.axis, sizes, tile, comm_dtype, backward_dtype)
        ring = RingPass.create(self.axis, each, comm_dtype, backward_dtype)
        return Passed(self.axis, each, tile, ring)

    def _number(self, name: str, value: Number) -> Number:
        one = isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex()
        if not one and (isinstance(value, bool) or not isinstance(value, int | float)):
            self._call.fail(
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

    def fail(self, problem: str, *, expected: str, got: str, remedy: str) -> None:
        """Raise on this rank; the other ranks raise `MismatchError`."""
        self._call.fail(problem, expected=expected, got=got, remedy=remedy)
