"""Distribution of a table of pairs: rows are local, columns are gathered or travel around a ring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from gradmesh.nn.contrastive.kernels import Kernel, Logits, Tensors, grouped
from gradmesh.nn.contrastive.ring import RingPass, ring_log_sums, ring_sum
from gradmesh.nn.contrastive.tiles import TileWork, log_sum, log_sums, table_sum
from gradmesh.nn.plain import upcast
from gradmesh.runtime.mesh import Axis
from gradmesh.types import R
from gradmesh.verbs.collectives import all_gather, all_reduce, reduce_scatter

__all__ = ["ExpKernel", "Gathered", "Layout", "LogSums", "Passed"]


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
        return ring_sum(self.ring, TileWork(kernel, self.tile), operands, known)

    def logs(
        self, kernel: ExpKernel, rows: Sequence[Tensor], cols: Sequence[Tensor], *, columns: bool
    ) -> tuple[Tensor, Tensor, Tensors]:
        """Two passes around the ring."""
        return _tiled_logs(self, kernel, rows, cols, columns=columns)
