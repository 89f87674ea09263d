"""Sums over the tiles of a table, with one tile in memory at a time, in every autodiff mode.

Forward saves the operands only. Backward is the same sum with the kernel's adjoint, which recomputes each tile; so are
the tangents and higher derivatives.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from gradmesh.nn.contrastive.kernels import Adjoint, Batched, Kernel, Logits, Tangent, Tensors, grouped
from gradmesh.nn.plain import upcast
from gradmesh.runtime.state import must_decompose
from gradmesh.transport import compiling

__all__ = ["TileWork", "log_sum", "log_sums", "merged", "runs", "table_sum", "tiled_sum"]


@dataclass(frozen=True)
class TileWork:
    """A kernel, and the size of its tiles."""

    kernel: Kernel
    tile: int


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


def table_sum(job: TileWork, operands: Sequence[Tensor], known: Sequence[Tensor] = ()) -> Tensors:
    """The kernel's outputs, summed over the tiles, differentiably; `known` outputs are not computed again."""
    if compiling():
        return _traced(job, operands)
    known = () if must_decompose() else known
    found: Tensors = _TableSum.apply(job, len(known), *known, *operands)  # type: ignore[no-untyped-call]
    return found


class _TableSum(torch.autograd.Function):
    """A sum over tiles; each of its derivatives is one too."""

    @staticmethod
    def forward(job: TileWork, known: int, *tensors: Tensor) -> Tensors:
        if known:
            return tuple(y.clone() for y in tensors[:known])
        return tiled_sum(job, *tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:  # noqa: ARG004
        ctx.job, ctx.known, *tensors = inputs
        ctx.save_for_backward(*tensors[ctx.known :])
        ctx.save_for_forward(*tensors[ctx.known :])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        kernel, operands = ctx.job.kernel, ctx.saved_tensors
        needed = ctx.needs_input_grad[2 + ctx.known :]
        wanted = tuple(n and d for n, d in zip(needed, kernel.differentiated, strict=True))
        none = [None] * (2 + ctx.known)
        if not any(wanted):
            return (*none, *(None for _ in operands))
        adjoint = Adjoint(kernel, wanted)
        found = iter(table_sum(TileWork(adjoint, ctx.job.tile), merged(kernel, operands, grads)))
        given = (
            next(found).to(x.dtype) if is_wanted else None
            for x, is_wanted in zip(operands, wanted, strict=True)
        )
        return (*none, *given)

    @staticmethod
    def jvp(ctx: Any, _: None, __: None, *tangents: Tensor | None) -> Tensors:
        kernel, operands = ctx.job.kernel, ctx.saved_tensors
        given = tangents[ctx.known :]
        moved = tuple(t is not None and d for t, d in zip(given, kernel.differentiated, strict=True))
        tangent = Tangent(kernel, moved)
        groups = zip(grouped(operands, kernel.counts), grouped(given, kernel.counts), strict=True)  # type: ignore[arg-type]
        flags = iter(moved)
        inputs = [x for group, along in groups for x in (*group, *[t for t in along if next(flags)])]
        return table_sum(TileWork(tangent, ctx.job.tile), inputs)

    @staticmethod
    def vmap(_: Any, in_dims: tuple[int | None, ...], job: TileWork, known: int, *tensors: Tensor) -> Any:
        operands, dims = tensors[known:], in_dims[2 + known :]
        cut = job.kernel.counts.rows + job.kernel.counts.cols
        moved = [
            x if dim is None else x.movedim(dim, int(i < cut))
            for i, (x, dim) in enumerate(zip(operands, dims, strict=True))
        ]
        batched = Batched(job.kernel, tuple(dim is not None for dim in dims))
        found = table_sum(TileWork(batched, job.tile), moved)
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
