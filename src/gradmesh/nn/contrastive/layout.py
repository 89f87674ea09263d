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
from gradmesh.nn.contrastive.tiles import Job, log_sums, table_sum
from gradmesh.types import R

__all__ = ["Gathered", "Layout", "LogSums", "Passed"]


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


@dataclass(frozen=True)
class Gathered:
    """Every rank has all columns. What is sent is sent by verbs, differentiably.

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
        rows, cols, shared = grouped(table_sum(Job(kernel, self.tile), operands, known), kernel.outputs)
        home = [reduce_scatter(y, self.axis, sizes=self.sizes) for y in cols]
        return (*rows, *home, *shared)


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
        return ring_sum(self.way, Job(kernel, self.tile), operands, known)
