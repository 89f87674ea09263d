"""Where a table of pairs lies: each rank has its own rows of it, and the columns are gathered or go round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from gradmesh.axis import Axis
from gradmesh.collectives import all_gather, all_reduce, reduce_scatter
from gradmesh.nn.contrastive.kernels import Kernel, Logits, Tensors, grouped
from gradmesh.nn.contrastive.ring import Round, ring_log_sums, ring_sum
from gradmesh.nn.contrastive.tiles import TileWork, log_sum, log_sums, table_sum, widened
from gradmesh.types import R

__all__ = ["ExpKernel", "Gathered", "Layout", "LogSums", "Passed"]


@dataclass(frozen=True)
class LogSums:
    """The logarithms of sums of exponentials, without derivatives.

    Attributes:
        rows: those of this rank's rows.
        columns: those of the columns, laid out as `Layout.spread` does; empty where they were not asked for.
        known: the sums of exp(s - them), as far as this rank has part in them: those of the rows, and of the columns.
        more: what else the kernel sums over rows.
    """

    rows: Tensor
    columns: Tensor
    known: Tensors
    more: Tensors


class Layout(Protocol):
    """Where the table lies."""

    def spread(self, x: Tensor) -> Tensor:
        """This rank's part of what belongs to the columns, where it has to be for `total`."""

    def own(self, x: Tensor) -> Tensor:
        """This rank's part again."""

    def log_sums(
        self, kernel: Logits, rows: Sequence[Tensor], cols: Sequence[Tensor], *, columns: bool
    ) -> LogSums:
        """The logarithms of the sums of the exponentials of each row of logits, and of each column."""

    def total(self, kernel: Kernel, operands: Sequence[Tensor], known: Sequence[Tensor] = ()) -> Tensors:
        """A kernel's outputs summed over the whole table: of this rank's rows, of its columns, and of its part."""

    def logs(
        self, kernel: ExpKernel, rows: Sequence[Tensor], cols: Sequence[Tensor], *, columns: bool
    ) -> tuple[Tensor, Tensor, Tensors]:
        """The same logarithms, differentiably: of this rank's rows and columns, and what else is summed over rows."""


class ExpKernel(Kernel, Logits, Protocol):
    """A kernel of exp(logits - x_i), summed over a row, and exp(logits - y_j), summed over a column."""


def _tiled_logs(
    table: Layout, kernel: ExpKernel, rows: Sequence[Tensor], cols: Sequence[Tensor], *, columns: bool
) -> tuple[Tensor, Tensor, Tensors]:
    """`Layout.logs` of a table of which a tile at a time is in memory."""
    with torch.no_grad():
        sums = table.log_sums(kernel, [x.detach() for x in rows], [x.detach() for x in cols], columns=columns)
    alone = sums.rows == -torch.inf  # and what is NaN stays so
    of_rows, of_cols = sums.rows.masked_fill(alone, 0), [sums.columns] if columns else []
    # log(sum(exp)) is this constant and the logarithm of a sum that is 1, and has its derivatives at every order.
    operands = (rows[0], of_rows, *rows[1:], *cols, *of_cols)
    others = kernel.outputs.rows - 1
    known = (sums.known[0], *sums.more[:others], *sums.known[1:])
    mine, *found = table.total(kernel, operands, known)
    logs = (of_rows + mine.masked_fill(alone, 1).log()).masked_fill(alone, -torch.inf)
    home = table.own(sums.columns) + found[others].log() if columns else sums.columns
    return logs, home, (*found[:others], *sums.more[others:])


@dataclass(frozen=True)
class Gathered:
    """Every rank has all columns. What is sent is sent by verbs, differentiably.

    A table of one tile is kept for backward as it is; of others nothing is kept, and backward computes them again.

    Attributes:
        axis: the ranks.
        sizes: how many columns each has; None: all the same.
        tile: the size of tiles.
        comm_dtype: what columns travel in.
        backward_dtype: what their gradients travel in.
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

    def own(self, x: Tensor) -> Tensor:
        """This rank's columns."""
        each = self.sizes or (len(x) // self.axis.size,) * self.axis.size
        return x[self.axis.slice(each)]

    def log_sums(
        self, kernel: Logits, rows: Sequence[Tensor], cols: Sequence[Tensor], *, columns: bool
    ) -> LogSums:
        """Those of the rows, and of the columns by a reduction of one number for each."""
        mine, part, more = log_sums(kernel, rows, cols, self.tile, columns=columns)
        ones = mine.isfinite().to(mine.dtype)
        if part is None:
            return LogSums(mine, mine[:0], (ones,), more)
        whole = all_reduce(part, self.axis, op="logsumexp", dst=R)
        return LogSums(mine, whole, (ones, (part - whole).exp()), more)

    def total(self, kernel: Kernel, operands: Sequence[Tensor], known: Sequence[Tensor] = ()) -> Tensors:
        """Sums of this rank's rows alone; those of the columns are added up where these are at home."""
        given = grouped(operands, kernel.counts)
        if self._is_one_tile(given[0], given[1]):
            with torch.autocast(operands[0].device.type, enabled=False):
                found = kernel(*map(widened, operands))
        else:
            found = table_sum(TileWork(kernel, self.tile), operands, known)
        rows, cols, shared = grouped(found, kernel.outputs)
        home = [reduce_scatter(y, self.axis, sizes=self.sizes) for y in cols]
        return (*rows, *home, *shared)

    def logs(
        self, kernel: ExpKernel, rows: Sequence[Tensor], cols: Sequence[Tensor], *, columns: bool
    ) -> tuple[Tensor, Tensor, Tensors]:
        """Of logits that are kept where they are one tile; the same is sent either way."""
        if not self._is_one_tile(rows, cols):
            return _tiled_logs(self, kernel, rows, cols, columns=columns)
        with torch.autocast(rows[0].device.type, enabled=False):
            s, more = kernel.logits(*map(widened, rows), *map(widened, cols))
        mine = log_sum(s, 1)
        if not columns:
            return mine, mine[:0], more
        part = log_sum(s, 0)
        with torch.no_grad():
            whole = all_reduce(part.detach(), self.axis, op="logsumexp", dst=R)
        home = reduce_scatter((part - whole).exp(), self.axis, sizes=self.sizes)
        return mine, self.own(whole) + home.log(), more

    def _is_one_tile(self, rows: Sequence[Tensor], cols: Sequence[Tensor]) -> bool:
        return max(len(rows[0]), len(cols[0])) <= self.tile


@dataclass(frozen=True)
class Passed:
    """The columns go round the ranks.

    Attributes:
        axis: the ranks.
        sizes: how many columns each has.
        tile: the size of tiles.
        way: the way round.
    """

    axis: Axis
    sizes: tuple[int, ...]
    tile: int
    way: Round

    def spread(self, x: Tensor) -> Tensor:
        """They stay where they are."""
        return x

    def own(self, x: Tensor) -> Tensor:
        """They are."""
        return x

    def log_sums(
        self, kernel: Logits, rows: Sequence[Tensor], cols: Sequence[Tensor], *, columns: bool
    ) -> LogSums:
        """Those of the rows and, at home, of the columns."""
        mine, home, more = ring_log_sums(self.way, kernel, rows, cols, self.tile, columns=columns)
        known = (mine,) if home is None else (mine, home)
        return LogSums(
            mine, mine[:0] if home is None else home, tuple(y.isfinite().to(y.dtype) for y in known), more
        )

    def total(self, kernel: Kernel, operands: Sequence[Tensor], known: Sequence[Tensor] = ()) -> Tensors:
        """In one round; the sums of the columns come home."""
        return ring_sum(self.way, TileWork(kernel, self.tile), operands, known)

    def logs(
        self, kernel: ExpKernel, rows: Sequence[Tensor], cols: Sequence[Tensor], *, columns: bool
    ) -> tuple[Tensor, Tensor, Tensors]:
        """In two rounds."""
        return _tiled_logs(self, kernel, rows, cols, columns=columns)
