"""Kernels: the computation of one tile of a table of pairs of samples, and its derivatives.

A kernel takes a tile's operands in three groups: sliced along the rows of the table, sliced along its columns, and
shared by all tiles. It returns outputs in the same three groups, which are summed over a row of tiles, over a column of
tiles, and over all tiles. A kernel's adjoint and tangent are kernels of the same form.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.func import vjp
from torch.nn.functional import softplus

__all__ = [
    "Adjoint",
    "Batched",
    "Counts",
    "ExpBoth",
    "ExpLabelled",
    "ExpOthers",
    "Kernel",
    "Logits",
    "Sigmoid",
    "Tangent",
    "Tensors",
    "grouped",
    "similarity",
]

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
