"""Sums over the tiles of a table that is never whole in memory, in every autodiff mode.

Forward keeps the operands and nothing of a tile. Backward is the same sum of the kernel's adjoint, which computes each
tile again, and so are the derivatives of that and the tangents: at every order a tile is all there is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from gradmesh.nn.contrastive.kernels import Adjoint, Batched, Kernel, Logits, Tangent, Tensors, grouped
from gradmesh.state import must_decompose
from gradmesh.transport import compiling

__all__ = ["TileWork", "log_sum", "log_sums", "merged", "runs", "table_sum", "tiled_sum", "widened"]


@dataclass(frozen=True)
class TileWork:
    """A kernel, and the size of its tiles."""

    kernel: Kernel
    tile: int


def runs(n: int, tile: int) -> Iterator[slice]:
    """The tiles of n rows; one that is empty of none."""
    return (slice(at, min(at + tile, n)) for at in range(0, max(n, 1), tile))


def widened(x: Tensor) -> Tensor:
    """A tensor in the precision that tiles are computed in: that of float32 at least."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def tiled_sum(job: TileWork, *operands: Tensor) -> Tensors:
    """The kernel's outputs, summed over the tiles; no derivative, and no graph.

    Args:
        job: the kernel.
        operands: its operands, whole, the rows' first.
    """
    rows, cols, shared = grouped(operands, job.kernel.counts)
    kept = job.kernel.outputs
    parts: list[list[Tensor]] = []
    columns: list[Tensor] = []
    totals: list[Tensor] = []
    with torch.autocast(rows[0].device.type, enabled=False):
        for here in runs(len(rows[0]), job.tile):
            mine = [widened(x[here]) for x in rows]
            sums: list[Tensor] = []
            for there in runs(len(cols[0]), job.tile):
                found = job.kernel(*mine, *(widened(x[there]) for x in cols), *map(widened, shared))
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
    """Sums, which are changed in place from the second time on."""
    if not sums:
        return [x.clone(memory_format=torch.contiguous_format) for x in more]
    return [total.add_(x) for total, x in zip(sums, more, strict=True)]


def table_sum(job: TileWork, operands: Sequence[Tensor], known: Sequence[Tensor] = ()) -> Tensors:
    """The kernel's outputs, summed over the tiles, differentiably.

    Args:
        job: the kernel.
        operands: its operands, whole, the rows' first.
        known: the outputs, where they are known; forward then has nothing to do.
    """
    if compiling():
        return _traced(job, operands)
    known = () if must_decompose() else known
    found: Tensors = _TableSum.apply(job, len(known), *known, *operands)  # type: ignore[no-untyped-call]
    return found


class _TableSum(torch.autograd.Function):
    """A sum over tiles, whose every derivative is one."""

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
        laid = [x for own, their in groups for x in (*own, *[t for t in their if next(flags)])]
        return table_sum(TileWork(tangent, ctx.job.tile), laid)

    @staticmethod
    def vmap(_: Any, in_dims: tuple[int | None, ...], job: TileWork, known: int, *tensors: Tensor) -> Any:
        operands, dims = tensors[known:], in_dims[2 + known :]
        cut = job.kernel.counts.rows + job.kernel.counts.cols
        moved = [
            x if dim is None else x.movedim(dim, int(place < cut))
            for place, (x, dim) in enumerate(zip(operands, dims, strict=True))
        ]
        batched = Batched(job.kernel, tuple(dim is not None for dim in dims))
        found = table_sum(TileWork(batched, job.tile), moved)
        cut = job.kernel.outputs.rows + job.kernel.outputs.cols
        return found, tuple(int(place < cut) for place in range(len(found)))


def merged(kernel: Kernel, operands: Sequence[Tensor], more: Sequence[Tensor]) -> list[Tensor]:
    """A kernel's operands and what is like its outputs, group by group."""
    groups = zip(grouped(operands, kernel.counts), grouped(more, kernel.outputs), strict=True)
    return [x for own, added in groups for x in (*own, *added)]


def _traced(job: TileWork, operands: Sequence[Tensor]) -> Tensors:
    """The same in a program that is being compiled: each tile is a checkpoint, which the compiler knows."""
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
                found = checkpoint(job.kernel, *map(widened, tile), use_reentrant=False)
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
    """log(sum(exp(logits))) of each row and, if asked for, of each column; no derivative, and no graph.

    Args:
        kernel: gives the logits of a tile.
        rows: what it takes of the rows.
        cols: what it takes of the columns.
        tile: the size of tiles.
        columns: whether the columns' are asked for.

    Returns:
        Those of the rows, those of the columns, and what else the kernel sums over rows.
    """
    down, across = list(runs(len(rows[0]), tile)), list(runs(len(cols[0]), tile))
    # Whole from the beginning: small results that are kept among the tiles would leave gaps in the heap that no later
    # tile fits into, so that the process would grow by a tile at every tile.
    with torch.autocast(rows[0].device.type, enabled=False):
        none, _ = kernel.logits(*(widened(x[:0]) for x in rows), *(widened(x[:0]) for x in cols))
    of_rows = none.new_empty(len(rows[0]))
    of_cols = of_rows.new_empty(len(down), len(cols[0]) if columns else 0)
    parts = of_rows.new_empty(len(across), min(tile, len(rows[0])))
    others: list[list[Tensor]] = []
    with torch.autocast(rows[0].device.type, enabled=False):
        for place, here in enumerate(down):
            mine = [widened(x[here]) for x in rows]
            sums: list[Tensor] = []
            for part, there in zip(parts, across, strict=True):
                s, more = kernel.logits(*mine, *(widened(x[there]) for x in cols))
                part[: len(s)] = log_sum(s, 1)
                sums = _add(sums, more)
                if columns:
                    of_cols[place, there] = log_sum(s, 0)
            of_rows[here] = log_sum(parts[:, : len(mine[0])], 0)
            others.append(sums)
    more = tuple(torch.cat(each) for each in zip(*others, strict=True))
    return of_rows, log_sum(of_cols, 0) if columns else None, more


def log_sum(x: Tensor, dim: int) -> Tensor:
    """log(sum(exp(x))) along a dim, differentiably; -inf of nothing."""
    return x.logsumexp(dim) if x.shape[dim] else x.sum(dim) - torch.inf
