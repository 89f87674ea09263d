"""What is computed of one tile of a table whose rows and columns are samples, and the derivatives of that.

A kernel takes a tile's operands in three groups: those cut along the rows of the table, those cut along its columns,
and those that every tile gets whole. It returns outputs in the same three groups, which are summed over the tiles of a
row, of a column, and over all tiles. What is summed so has a derivative that is summed so: a kernel's adjoint takes the
outputs' cotangents in the groups of the outputs and returns the operands' in theirs. So is its tangent.
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
    """How many tensors each group has."""

    rows: int
    cols: int
    shared: int


class Logits(Protocol):
    """What is known of the logits of one tile."""

    def logits(self, *operands: Any, **_: Any) -> tuple[Tensor, Tensors]:
        """The logits, and what else is summed over each row."""


class Kernel(Protocol):
    """What is computed of one tile."""

    def __call__(self, *operands: Any, **_: Any) -> Tensors:
        """The outputs of a tile, those of the rows first, those of all tiles last."""

    @property
    def counts(self) -> Counts:
        """How many operands there are."""

    @property
    def outputs(self) -> Counts:
        """How many outputs there are."""

    @property
    def differentiated(self) -> tuple[bool, ...]:
        """Which operands have derivatives."""


def grouped(tensors: Sequence[Tensor], counts: Counts) -> tuple[Tensors, Tensors, Tensors]:
    """Tensors by their group."""
    rows, cols = counts.rows, counts.rows + counts.cols
    return tuple(tensors[:rows]), tuple(tensors[rows:cols]), tuple(tensors[cols:])


def similarity(a: Tensor, b: Tensor) -> Tensor:
    """The products of rows of both."""
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
    """exp(s - x_i) summed over a row; samples have a number, as rows and as columns, and none is a pair with itself."""

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
    """The same, and the similarities to other samples of the same label, summed over a row."""

    counts = Counts(4, 3, 0)
    outputs = Counts(2, 0, 0)
    differentiated = (True, False, False, False, True, False, False)

    def logits(
        self, a: Tensor, number: Tensor, label: Tensor, b: Tensor, numbers: Tensor, labels: Tensor
    ) -> tuple[Tensor, Tensors]:
        """The similarities to others; the sum of those of the same label, and their number."""
        s, own = similarity(a, b), number[:, None] == numbers
        alike = (label[:, None] == labels) & ~own
        return torch.where(own, -torch.inf, s), (torch.where(alike, s, 0).sum(1), alike.sum(1))

    def __call__(
        self, a: Tensor, x: Tensor, number: Tensor, label: Tensor, b: Tensor, numbers: Tensor, labels: Tensor
    ) -> Tensors:
        """Both sums."""
        s, (alike, _) = self.logits(a, number, label, b, numbers, labels)
        return (s - x[:, None]).exp().sum(1), alike


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
    """The vector-Jacobian product of a kernel: its operands, then its outputs' cotangents, group by group.

    Attributes:
        of: the kernel.
        wanted: of which of its operands the gradient is returned.
    """

    of: Kernel
    wanted: tuple[bool, ...]

    @property
    def counts(self) -> Counts:
        """The operands and the cotangents."""
        return _added(self.of.counts, self.of.outputs)

    @property
    def outputs(self) -> Counts:
        """The gradients that are wanted."""
        return Counts(*(sum(group) for group in _flags(self.wanted, self.of.counts)))

    @property
    def differentiated(self) -> tuple[bool, ...]:
        """Those of the kernel, and all cotangents."""
        return _with(self.of.differentiated, self.of, True)

    def __call__(self, *operands: Tensor) -> Tensors:
        """The gradients."""
        given, cotangents = _parted(operands, self.of.counts, self.counts)
        wanted = [x for x, is_wanted in zip(given, self.wanted, strict=True) if is_wanted]
        found: Tensors = vjp(_of_wanted(self.of, given, self.wanted), *wanted)[1](cotangents)
        return found


@dataclass(frozen=True)
class Tangent:
    """The Jacobian-vector product of a kernel: its operands, then the tangents of some, group by group.

    It is the adjoint of the adjoint, which needs no level of forward mode, of which a process has one.

    Attributes:
        of: the kernel.
        moved: which of its operands have a tangent.
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
        return tuple(flag for own, moved in groups for flag in (*own, *[True] * sum(moved)))

    def __call__(self, *operands: Tensor) -> Tensors:
        """The outputs' tangents."""
        given, tangents = _parted(operands, self.of.counts, self.counts)
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
    """A kernel for many at once; what is cut has the batch in its second dimension, what is whole in its first.

    Attributes:
        of: the kernel.
        has: which of its operands are batched.
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
    return tuple(flag for own, added in groups for flag in (*own, *[more] * added))


def _parted(operands: Sequence[Tensor], first: Counts, both: Counts) -> tuple[Tensors, Tensors]:
    """A kernel's own operands, and what else is handed in with them, group by group."""
    groups = list(zip(grouped(operands, both), first, strict=True))
    own = tuple(x for group, n in groups for x in group[:n])
    return own, tuple(x for group, n in groups for x in group[n:])
