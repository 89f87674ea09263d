"""The typed readings of a map over ranks, and which of them a gradient obeys.

A reading gives every operand and every result a type. Backward is the adjoint under it if, for all operands and
gradients that the types allow, the gradients have their types and

    sum over results <A x, y> = sum over operands <x, A* y>

with the pairing of `gradmesh.types`: summed over the ranks, and counted once if the type is I.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradmesh.types import Type
from gradmesh.verify.auditing.subject import Note
from gradmesh.verify.laws import as_real

V, R, P, I = Type.V, Type.R, Type.P, Type.I  # noqa: E741 - the names of the types

_SAME = (R, I)
_MOST = 4**6
"""The maximum number of readings; with more combinations, all operands get the same type."""

Pattern = tuple[tuple[bool, ...], tuple[bool, ...]]
"""Which operands, and which gradients of results, are the same on every rank."""

Values = Sequence[Sequence[Tensor]]
"""For each rank, its tensors."""


@dataclass
class Answer:
    """The outcome of a probe on one rank."""

    # the drawn operands, or directions for a nonlinear function
    operands: list[Tensor] = field(default_factory=list)
    # the results, or the derivative along those directions
    results: list[Tensor] = field(default_factory=list)
    cotangents: list[Tensor] = field(default_factory=list)  # the drawn gradients of the results
    # the gradients of the operands; zeros in place of None
    gradients: list[Tensor] = field(default_factory=list)
    reached: bool = False  # whether any gradient was not None
    notes: list[Note] = field(default_factory=list)  # forbidden writes and shared memory: kind, text and line
    # "file:line" of the backward of each autograd Function in the graph that is not of gradmesh
    lines: list[str] = field(default_factory=list)
    scaled: bool = False  # whether gm.scale_gradient is in the graph


@dataclass(frozen=True)
class Reading:
    """A type for every operand and every result."""

    src: tuple[Type, ...]
    dst: tuple[Type, ...]

    @property
    def pattern(self) -> Pattern:
        """Which operands and gradients must be identical on every rank."""
        return tuple(t in _SAME for t in self.src), tuple(t.dual in _SAME for t in self.dst)

    def __str__(self) -> str:
        return f"{_joined(self.src)} -> {_joined(self.dst)}"

    def implies(self, other: Reading) -> bool:
        """Whether the other reading holds whenever this one does."""
        return all(
            a is b or (a, b) in _STRONGER_SRC for a, b in zip(self.src, other.src, strict=True)
        ) and all(a is b or (a, b) in _STRONGER_DST for a, b in zip(self.dst, other.dst, strict=True))


_STRONGER_SRC = {(P, V), (P, R), (V, R)}
"""P requires an identical gradient on every rank, V does not; R restricts the operand to identical values."""
_STRONGER_DST = {(R, V), (R, P), (V, P)}
"""R requires an identical result on every rank; P restricts the gradient to identical values."""


def _joined(types: tuple[Type, ...]) -> str:
    return str(types[0]) if len(set(types)) == 1 else ", ".join(map(str, types))


def all_readings(
    operands: Sequence[Sequence[int] | None], results: Sequence[Sequence[int] | None]
) -> list[Reading]:
    """Every reading of a map; a shape is None if it differs between ranks, so that only V is possible."""
    src = [(V, R, P, I) if shape is not None else (V,) for shape in operands]
    dst = [(V, R, P, I) if shape is not None else (V,) for shape in results]
    if all_tried(operands, results):
        return [Reading(s, d) for s in itertools.product(*src) for d in itertools.product(*dst)]
    return [
        Reading(tuple(s if s in t else V for t in src), tuple(d if d in t else V for t in dst))
        for s in (V, R, P, I)
        for d in (V, R, P, I)
    ]


def all_tried(operands: Sequence[Sequence[int] | None], results: Sequence[Sequence[int] | None]) -> bool:
    """Whether `all_readings` returns every combination of types."""
    free = sum(shape is not None for shape in (*operands, *results))
    return bool(4**free <= _MOST)


def named(arrow: str, operands: int, results: int) -> Reading | None:
    """Parse an arrow: one type for each operand and result, or one for all; None if it is invalid.

    >>> str(named("V, I -> R", 2, 3)), named("V", 1, 1)
    ('V, I -> R', None)
    """
    sides = [re.findall(r"[^\s,]+", side) for side in arrow.split("->")]
    if len(sides) != 2:
        return None
    try:
        src, dst = ([Type(letter) for letter in side] for side in sides)
    except ValueError:
        return None
    if len(src) not in (1, operands) or len(dst) not in (1, results):
        return None
    return Reading(tuple(src * (operands // len(src))), tuple(dst * (results // len(dst))))


def usual(reading: Reading) -> bool:
    """Whether collectives are commonly written for such a reading.

    Results of type P and operands of type R are excluded: they constrain the gradient so little (identical on every
    rank; correct only in the sum over ranks) that a wrong backward may satisfy them by accident.
    """
    return P not in reading.dst and R not in reading.src


_NAMES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("reduce_scatter|reducescatter", ("P -> V", "V -> V")),
    ("all_gather|allgather|gather_from", ("V -> R", "V -> I")),
    ("all_reduce|allreduce|reduce_from", ("P -> R", "P -> I", "V -> R", "V -> I")),
    ("all_to_all|alltoall|all2all", ("V -> V",)),
    ("copy_to", ("I -> R",)),
    ("scatter_to", ("R -> V", "I -> V")),
    ("shift|permute|ring", ("V -> V",)),
)
"""The intended readings of functions with such names; the first match counts."""


def usual_of_name(name: str) -> tuple[str, ...]:
    """The readings that a function's name suggests; empty if none.

    >>> usual_of_name("_ReduceFromModelParallelRegion"), usual_of_name("String")
    (('P -> R', 'P -> I', 'V -> R', 'V -> I'), ())
    """
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|\W", "_", name).lower()
    for known, arrows in _NAMES:
        if re.search(rf"(^|_)({known})(_|$)", words):
            return arrows
    return ()


def strongest(readings: Iterable[Reading]) -> list[Reading]:
    """The readings that are not implied by another one."""
    readings = list(dict.fromkeys(readings))
    return [r for r in readings if not any(other != r and other.implies(r) for other in readings)]


def agree(values: Values, index: int, tolerance: float) -> bool:
    """Whether a tensor is the same on every rank."""
    first = values[0][index]
    return all(distance(row[index], first) <= tolerance for row in values[1:])


def largest_distance(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    """The largest distance of corresponding tensors; infinite if the numbers of tensors differ."""
    if len(one) != len(other):
        return math.inf
    return max(map(distance, one, other), default=0.0)


def ranks_apart(
    ones: Iterable[Sequence[Tensor]], others: Iterable[Sequence[Tensor]], tolerance: float
) -> tuple[int, ...]:
    """The ranks whose tensors differ."""
    pairs = enumerate(zip(ones, others, strict=True))
    return tuple(rank for rank, pair in pairs if largest_distance(*pair) > tolerance)


def distance(a: Tensor, b: Tensor) -> float:
    """The largest difference of two tensors, relative to the largest value; infinite if the shapes differ.

    Equal infinities, and NaN in both, count as 0; a value that is not finite in only one of them as infinite.
    """
    if a.shape != b.shape:
        return math.inf
    if not a.numel():
        return 0.0
    if a.is_complex() or b.is_complex():
        a, b = a.to(torch.complex128), b.to(torch.complex128)
    a, b = as_real(a), as_real(b)
    off = torch.where((a == b) | (a.isnan() & b.isnan()), torch.zeros_like(a), (a - b).abs())
    sizes = torch.nan_to_num(torch.maximum(a.abs(), b.abs()), 0, 0, 0)
    found = float(off.max()) / max(1e-300, float(sizes.max()))
    return math.inf if math.isnan(found) else found


class Pairings:
    """The inner products of the probes of one pattern, computed once for all of its readings."""

    def __init__(self, probes: Sequence[Sequence[Answer]], tolerance: float) -> None:
        self.probes = probes
        self._tolerance = tolerance
        self._alike = self._same([[a.results for a in ranks] for ranks in probes])
        self._alike_back = self._same([[a.gradients for a in ranks] for ranks in probes])
        self._out = [[_products(a.results, a.cotangents) for a in ranks] for ranks in probes]
        self._back = [[_products(a.operands, a.gradients) for a in ranks] for ranks in probes]

    def _same(self, probes: Sequence[Values]) -> list[bool]:
        """For each tensor, whether it is the same on every rank in all probes."""
        count = len(probes[0][0])
        return [all(agree(values, i, self._tolerance) for values in probes) for i in range(count)]

    def _sides(self, reading: Reading) -> list[tuple[_Pair, _Pair]]:
        """For each probe, <A x, y> and <x, A* y>."""
        return [
            (_counted(reading.dst, out), _counted(reading.src, back))
            for out, back in zip(self._out, self._back, strict=True)
        ]

    def error(self, reading: Reading) -> float:
        """The error of backward as an adjoint under a reading; infinite if values do not have its types."""
        needed = [kind in _SAME for kind in reading.dst] + [kind.dual in _SAME for kind in reading.src]
        if any(
            same and not alike for same, alike in zip(needed, self._alike + self._alike_back, strict=True)
        ):
            return math.inf
        worst = 0.0
        for (left, left_size), (right, right_size) in self._sides(reading):
            error = abs(left - right) / max(1e-300, left_size, right_size)
            worst = max(worst, math.inf if math.isnan(error) else error)
        return worst

    def factor(self, reading: Reading) -> float | None:
        """The factor of the gradient relative to the correct one, if it is the same in every probe."""
        sides = self._sides(reading)
        (left, _), (right, _) = sides[0]
        if math.isinf(self.error(reading)) or abs(left) < 1e-12 or abs(right) < 1e-12:
            return None
        factor = right / left
        off = max(
            abs(back / factor - out) / max(1e-300, out_size, back_size / abs(factor))
            for (out, out_size), (back, back_size) in sides
        )
        return factor if off <= 10 * self._tolerance else None

    def factors_by_rank(self, reading: Reading) -> list[float] | None:
        """Each rank's factor relative to the correct gradient, if the factors are the same in every probe.

        Needs at least two more probes than ranks.
        """
        rows = [[_counted(reading.src, [row])[0] for row in ranks] for ranks in self._back]
        if len(rows) < len(rows[0]) + 2:
            return None
        wanted = [_counted(reading.dst, out)[0] for out in self._out]
        matrix, vector = torch.tensor(rows, dtype=torch.float64), torch.tensor(wanted, dtype=torch.float64)
        found = torch.linalg.lstsq(matrix, vector).solution
        off = float((matrix @ found - vector).abs().max() / vector.abs().max().clamp_min(1e-300))
        if off > max(1e-8, 100 * self._tolerance) or bool((found.abs() < 1e-12).any()):
            return None
        return [1 / float(f) for f in found]


_Pair = tuple[float, float]
"""<x, y>, and the sum of its terms' absolute values."""


def _products(xs: Sequence[Tensor], ys: Sequence[Tensor]) -> list[_Pair]:
    products = [as_real(x) * as_real(y) for x, y in zip(xs, ys, strict=True)]
    return [(float(each.sum()), float(each.abs().sum())) for each in products]


def _counted(kinds: Sequence[Type], rows: Sequence[Sequence[_Pair]]) -> _Pair:
    """The sum over ranks, in which a value of type I counts once."""
    counted = [
        pair
        for rank, row in enumerate(rows)
        for kind, pair in zip(kinds, row, strict=True)
        if kind is not I or not rank
    ]
    return sum(total for total, _ in counted), sum(size for _, size in counted)
