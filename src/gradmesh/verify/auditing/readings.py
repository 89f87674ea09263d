"""The typed readings of a map over ranks, and which of them a gradient obeys.

A reading gives every operand and every result a type. Backward is the adjoint under it if, for all operands and
gradients that the types admit, the gradients are of their types and

    sum over results <A x, y> = sum over operands <x, A* y>

with the pairing of `gradmesh.types`: summed over the ranks, and counted once where the type is I.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gradmesh.types import Type
from gradmesh.verify.laws import as_real

if TYPE_CHECKING:
    from gradmesh.verify.auditing.probes import Answer

__all__ = [
    "Pairings",
    "Pattern",
    "Reading",
    "agree",
    "all_readings",
    "all_tried",
    "distance",
    "law_error",
    "named",
    "paired",
    "strongest",
    "usual",
    "usual_of_name",
]

V, R, P, I = Type.V, Type.R, Type.P, Type.I  # noqa: E741 - the names of the types

_SAME = (R, I)
_MOST = 4**6
"""Readings that are tried one by one; with more operands all of them get the same type."""

Pattern = tuple[tuple[bool, ...], tuple[bool, ...]]
"""Which operands, and which gradients of results, are the same on every rank."""

Values = Sequence[Sequence[Tensor]]
"""For each rank, its tensors."""


@dataclass(frozen=True)
class Reading:
    """A type for every operand and every result."""

    src: tuple[Type, ...]
    dst: tuple[Type, ...]

    @property
    def pattern(self) -> Pattern:
        """What has to be the same on every rank to be admissible."""
        return tuple(t in _SAME for t in self.src), tuple(t.dual in _SAME for t in self.dst)

    def __str__(self) -> str:
        return f"{_joined(self.src)} -> {_joined(self.dst)}"

    def implies(self, other: Reading) -> bool:
        """Whether the other one holds wherever this one does, as it admits less or asks for less."""
        return all(
            a is b or (a, b) in _STRONGER_SRC for a, b in zip(self.src, other.src, strict=True)
        ) and all(a is b or (a, b) in _STRONGER_DST for a, b in zip(self.dst, other.dst, strict=True))


_STRONGER_SRC = {(P, V), (P, R), (V, R)}
"""An operand of P asks for a gradient that is the same on every rank; one of R may be the same on every rank only."""
_STRONGER_DST = {(R, V), (R, P), (V, P)}
"""A result of R is the same on every rank; one of P only meets gradients that are."""


def _joined(types: tuple[Type, ...]) -> str:
    return str(types[0]) if len(set(types)) == 1 else ", ".join(map(str, types))


def all_readings(
    operands: Sequence[Sequence[int] | None], results: Sequence[Sequence[int] | None]
) -> list[Reading]:
    """Every reading of a map.

    Args:
        operands: the shape of each operand, or None where the ranks' differ, so that no value is the same on all.
        results: that of each result.
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
    """Whether `all_readings` has every combination of types."""
    free = sum(shape is not None for shape in (*operands, *results))
    return bool(4**free <= _MOST)


def named(arrow: str, operands: int, results: int) -> Reading | None:
    """The reading that an arrow names: one type for each operand and result, or one for all; None: it names none.

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
    """Whether collectives are written to be the adjoint under such a reading, and under none that says more.

    A result that is a pending sum gets the same gradient on every rank, and an operand that is R needs its gradient
    right in the sum over ranks alone: a wrong backward may be right by that, without anybody having meant it.
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
"""What functions are meant under whose name has such words, the first that fit."""


def usual_of_name(name: str) -> tuple[str, ...]:
    """The conventions that the name of a function suggests; none if it suggests none.

    >>> usual_of_name("_ReduceFromModelParallelRegion"), usual_of_name("String")
    (('P -> R', 'P -> I', 'V -> R', 'V -> I'), ())
    """
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|\W", "_", name).lower()
    for known, arrows in _NAMES:
        if re.search(rf"(^|_)({known})(_|$)", words):
            return arrows
    return ()


def strongest(readings: Iterable[Reading]) -> list[Reading]:
    """Those that follow from no other."""
    readings = list(dict.fromkeys(readings))
    return [r for r in readings if not any(other != r and other.implies(r) for other in readings)]


def paired(kinds: Sequence[Type], a: Values, b: Values) -> tuple[float, float]:
    """<a, b> of tensors of these types over all ranks, and the size of its terms."""
    rows = [[_pair(x, y) for x, y in zip(row, other, strict=True)] for row, other in zip(a, b, strict=True)]
    return _counted(kinds, rows)


def agree(values: Values, index: int, tolerance: float) -> bool:
    """Whether a tensor is the same on every rank."""
    first = values[0][index]
    return all(distance(row[index], first) <= tolerance for row in values[1:])


def distance(a: Tensor, b: Tensor) -> float:
    """How far two tensors are from each other, relative to their size; infinite where shapes differ.

    The same infinity in both is no distance, and neither is NaN; what is not finite in one alone is infinitely far.
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
    """Probes of one pattern, paired and compared once for all of its readings.

    Args:
        probes: for each probe, each rank's answer.
        tolerance: up to which values on different ranks count as the same.
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
    """How far backward is from the adjoint under a reading; infinite where values do not have its types.

    Args:
        reading: the types.
        answers: for each pattern, for each probe, each rank's answer.
        tolerance: up to which values on different ranks count as the same.
    """
    return Pairings(answers[reading.pattern], tolerance).error(reading)


_Pair = tuple[float, float]
"""<x, y>, and the size of its terms."""


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
