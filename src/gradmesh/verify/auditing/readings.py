"""The typed readings of a map over ranks, and which of them a gradient obeys.

A reading gives every operand and every result a type. Backward is the adjoint under it if, for all operands and
gradients that the types allow, the gradients have their types and

    sum over results <A x, y> = sum over operands <x, A* y>

with the pairing of `gradmesh.types`: summed over the ranks, and counted once if the type is I.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradmesh.types import Type
from gradmesh.verify.auditing.subject import Failure, Note
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
    """The outcome of a probe on one rank.

    Attributes:
        operands: the drawn operands, or directions for a nonlinear function.
        results: the results, or the derivative along those directions.
        cotangents: the drawn gradients of the results.
        gradients: the gradients of the operands; zeros in place of None.
        reached: whether any gradient was not None.
        notes: forbidden writes and shared memory: kind, text and line.
        lines: "file:line" of the backward of each autograd Function in the graph.
        failure: the exception that ended the probe.
    """

    operands: list[Tensor] = field(default_factory=list)
    results: list[Tensor] = field(default_factory=list)
    cotangents: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    reached: bool = False
    notes: list[Note] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    failure: Failure | None = None


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
    """Every reading of a map.

    Args:
        operands: the shape of each operand, or None if it differs between ranks, so that only V is possible.
        results: the same for each result.
    """
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


def paired(kinds: Sequence[Type], a: Values, b: Values) -> tuple[float, float]:
    """<a, b> over all ranks, for tensors of these types, and the sum of its terms' absolute values."""
    rows = [[_pair(x, y) for x, y in zip(row, other, strict=True)] for row, other in zip(a, b, strict=True)]
    return _counted(kinds, rows)


def agree(values: Values, index: int, tolerance: float) -> bool:
    """Whether a tensor is the same on every rank."""
    first = values[0][index]
    return all(distance(row[index], first) <= tolerance for row in values[1:])


def distance(a: Tensor, b: Tensor) -> float:
    """The largest difference of two tensors, relative to the largest value; infinite if the shapes differ.

    Equal infinities, and NaN in both, count as 0; a value that is not finite in only one of them as infinite.
    """
    if a.shape != b.shape:
        return float("inf")
    if not a.numel():
        return 0.0
    if a.is_complex() or b.is_complex():
        a, b = a.to(torch.complex128), b.to(torch.complex128)
    a, b = as_real(a), as_real(b)
    off = torch.where((a == b) | (a.isnan() & b.isnan()), torch.zeros_like(a), (a - b).abs())
    sizes = torch.nan_to_num(torch.maximum(a.abs(), b.abs()), 0, 0, 0)
    found = float(off.max()) / max(1e-300, float(sizes.max()))
    return found if found == found else float("inf")


class Pairings:
    """The inner products of the probes of one pattern, computed once for all of its readings.

    Args:
        probes: for each probe, each rank's answer.
        tolerance: the relative difference up to which values on different ranks count as equal.
    """

    def __init__(self, probes: Sequence[Sequence[Answer]], tolerance: float) -> None:
        self.alike: list[bool] = []
        self.alike_back: list[bool] = []
        self.terms: list[tuple[list[list[_Pair]], list[list[_Pair]]]] = []
        for ranks in probes:
            results, grads = [a.results for a in ranks], [a.gradients for a in ranks]
            for flags, values in ((self.alike, results), (self.alike_back, grads)):
                same = [agree(values, i, tolerance) for i in range(len(values[0]))]
                flags[:] = [a and b for a, b in zip(flags, same, strict=True)] if flags else same
            self.terms.append(
                (
                    [[_pair(x, y) for x, y in zip(a.results, a.cotangents, strict=True)] for a in ranks],
                    [[_pair(x, y) for x, y in zip(a.operands, a.gradients, strict=True)] for a in ranks],
                )
            )

    def error(self, reading: Reading) -> float:
        """As `law_error`."""
        if any(
            kind in _SAME and not alike for kind, alike in zip(reading.dst, self.alike, strict=True)
        ) or any(
            kind.dual in _SAME and not alike for kind, alike in zip(reading.src, self.alike_back, strict=True)
        ):
            return float("inf")
        worst = 0.0
        for out, back in self.terms:
            left, left_size = _counted(reading.dst, out)
            right, right_size = _counted(reading.src, back)
            error = abs(left - right) / max(1e-300, left_size, right_size)
            worst = max(worst, error if error == error else float("inf"))
        return worst


def law_error(
    reading: Reading, answers: Mapping[Pattern, Sequence[Sequence[Answer]]], tolerance: float
) -> float:
    """The error of backward as an adjoint under a reading; infinite if values do not have its types.

    Args:
        reading: the types.
        answers: for each pattern, for each probe, each rank's answer.
        tolerance: the relative difference up to which values on different ranks count as equal.
    """
    return Pairings(answers[reading.pattern], tolerance).error(reading)


_Pair = tuple[float, float]
"""<x, y>, and the sum of its terms' absolute values."""


def _pair(x: Tensor, y: Tensor) -> _Pair:
    products = as_real(x) * as_real(y)
    return float(products.sum()), float(products.abs().sum())


def _counted(kinds: Sequence[Type], rows: Sequence[Sequence[_Pair]]) -> _Pair:
    counted = [
        pair
        for rank, row in enumerate(rows)
        for kind, pair in zip(kinds, row, strict=True)
        if kind is not I or not rank
    ]
    return sum(total for total, _ in counted), sum(size for _, size in counted)
