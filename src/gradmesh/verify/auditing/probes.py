"""A rank's side of an audit: forward and backward on drawn operands, and what was written that may not be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gradmesh.verify.auditing.operands import draw
from gradmesh.verify.auditing.subject import Subject, Trouble, call_differentiably, held, of_error
from gradmesh.verify.auditing.watch import Note, Watch, changed, shared

__all__ = [
    "Answer",
    "Point",
    "Probe",
    "attempt",
    "configure",
    "cotangents",
    "difference",
    "drawn",
    "filled",
    "first_order",
    "leaves_of",
    "mapped",
    "tangents",
]

_NOBODY = 100_000
"""Owns the values that a rank draws in place of its own."""
_COTANGENTS = 1000
"""What is added to the number of an operand to draw the gradient of a result."""


@dataclass(frozen=True)
class Point:
    """Where a function that is not linear is differentiated, and by which step.

    Attributes:
        step: that of central differences; 0 for a linear function, which is its own derivative.
        shared: the operands where they are the same on every rank; else each rank's own count.
        turned: for each rank, other operands to take for its own.
        own: whether the rank's own operands are the point; else it is zero.
    """

    step: float = 0.0
    shared: tuple[Tensor | None, ...] = ()
    turned: tuple[tuple[Tensor, ...], ...] = ()
    own: bool = True


@dataclass(frozen=True)
class Probe:
    """One question: operands and gradients to draw, forward and backward to run.

    Attributes:
        seed: another number, other values.
        alike: which operands are the same on every rank.
        alike_out: which gradients of results are.
        whole: whether values are small whole numbers.
        complex: whether operands are complex though those of `build` are not.
        turn: how many ranks further the rank is whose operands this one draws, of `ranks` in a ring.
        turn_out: the same for the gradients of results.
        ranks: how many ranks take part, where something is turned.
        other: a rank that draws other operands than it would, or -1.
        other_out: the same for the gradients of results.
        only: the one operand or result that is turned or drawn otherwise; -1 for all of them.
        point: where a function that is not linear is differentiated.
    """

    seed: int
    alike: tuple[bool, ...] = ()
    alike_out: tuple[bool, ...] = ()
    whole: bool = False
    complex: bool = False
    turn: int = 0
    turn_out: int = 0
    ranks: int = 1
    other: int = -1
    other_out: int = -1
    only: int = -1
    point: Point = field(default_factory=Point)


@dataclass
class Answer:
    """What one rank found.

    Attributes:
        operands: what was drawn: operands, or directions for a function that is not linear.
        results: what came out, or the derivative along those directions.
        cotangents: the gradients of the results that were drawn.
        gradients: those of the operands; zeros where there are none.
        reached: whether any gradient came.
        notes: what was written that may not be, and what shares memory: kind, text, and line.
        lines: where the backwards of the autograd Functions in the graph begin.
        trouble: the exception that ended the question.
    """

    operands: list[Tensor] = field(default_factory=list)
    results: list[Tensor] = field(default_factory=list)
    cotangents: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    reached: bool = False
    notes: list[Note] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    trouble: Trouble | None = None


def configure(**settings: Any) -> None:
    """Change what this rank's function is held with."""
    subject = held()
    for name, value in settings.items():
        setattr(subject, name, value)


def attempt(probes: Sequence[Probe], ask: Callable[[Subject, Probe], Answer]) -> list[Answer]:
    """The answers to questions one after another, up to the first that raises."""
    answers: list[Answer] = []
    subject = held()
    for probe in probes:
        answer = Answer()
        try:
            answer = ask(subject, probe)
        except (Exception, SystemExit) as error:
            answer.trouble = of_error(error)
        answers.append(answer)
        if answer.trouble is not None:
            break
    return answers


def first_order(probes: Sequence[Probe]) -> list[Answer]:
    """Forward and backward of each probe."""
    return attempt(probes, _first_order)


def tangents(probes: Sequence[Probe]) -> list[Answer]:
    """The map alone, without backward."""
    return attempt(probes, lambda subject, probe: Answer(*mapped(subject, probe)))


def drawn(subject: Subject, probe: Probe) -> list[Tensor]:
    """The operands of a probe."""
    same = probe.alike or (False,) * len(subject.operands)
    return [
        draw(
            subject.shape(i),
            subject.operand_dtype(i, probe.complex),
            probe.seed + 31 * i,
            -1 if same[i] else _owner(subject, probe, i, probe.turn, probe.other),
            whole=probe.whole,
        )
        for i in range(len(subject.operands))
    ]


def cotangents(subject: Subject, probe: Probe, results: Sequence[Tensor]) -> list[Tensor]:
    """The gradients of the results of a probe."""
    same = probe.alike_out or (False,) * len(results)
    return [
        draw(
            y.shape,
            y.dtype,
            probe.seed + _COTANGENTS + 31 * i,
            -1 if same[i] else _owner(subject, probe, i, probe.turn_out, probe.other_out),
            whole=probe.whole,
        )
        for i, y in enumerate(results)
    ]


def _owner(subject: Subject, probe: Probe, index: int, turn: int, other: int) -> int:
    if probe.only not in (-1, index):
        return subject.rank
    if subject.rank == other:
        return _NOBODY
    return (subject.rank + turn) % probe.ranks if turn else subject.rank


def leaves_of(subject: Subject, probe: Probe) -> list[Tensor]:
    """Operands to call the function with: drawn ones, or the point where it is differentiated."""
    own = probe.point.step and probe.point.own
    return point_of(subject, probe) if own else [x.clone() for x in drawn(subject, probe)]


def point_of(subject: Subject, probe: Probe) -> list[Tensor]:
    """Where a function that is not linear is differentiated."""
    same = probe.alike or (False,) * len(subject.operands)
    values = []
    for i in range(len(subject.operands)):
        shared = probe.point.shared[i] if probe.point.shared and same[i] else None
        shared = probe.point.turned[subject.rank][i] if probe.point.turned else shared
        value = subject.inputs[subject.operands[i]].detach() if shared is None else shared
        value = value.to(subject.operand_dtype(i, probe.complex))
        values.append(value.clone() if probe.point.own else torch.zeros_like(value))
    return values


def mapped(subject: Subject, probe: Probe) -> tuple[list[Tensor], list[Tensor]]:
    """What was drawn, and what the function, or its derivative, makes of it."""
    x = drawn(subject, probe)
    if not probe.point.step:
        return x, filled(subject.call([v.clone() for v in x]))
    base, step = point_of(subject, probe), probe.point.step
    with torch.no_grad():
        ahead = filled(subject.call([b + step * v for b, v in zip(base, x, strict=True)]))
        behind = filled(subject.call([b - step * v for b, v in zip(base, x, strict=True)]))
    return x, [difference(a, b) / (2 * step) for a, b in zip(ahead, behind, strict=True)]


def difference(a: Tensor, b: Tensor) -> Tensor:
    """The difference; 0 where both are the same infinity, as under a mask."""
    return torch.where(a == b, torch.zeros_like(a), a - b)


def _first_order(subject: Subject, probe: Probe) -> Answer:
    answer = Answer()
    if probe.point.step:
        answer.operands, answer.results = mapped(subject, probe)
    else:
        answer.operands = drawn(subject, probe)
    leaves = [x.requires_grad_() for x in leaves_of(subject, probe)]
    with call_differentiably(subject) as backward:
        given = [leaf.clone() for leaf in leaves]  # the result of another op, into which one may write
        before = [x.detach().clone() for x in given]
        results = subject.call(given)
        answer.notes += changed("operand-overwritten", "forward writes into operand {}", given, before, [])
        answer.notes += shared(given, results)
        out = filled(results)
        if not probe.point.step:
            answer.results = out
        answer.cotangents = cotangents(subject, probe, results)
        handed = [y.clone() for y in answer.cotangents]
        watched = Watch(results)
        answer.lines = watched.lines
        before = [x.detach().clone() for x in given]
        grads = backward(results, leaves, handed)
    answer.reached = any(g is not None for g in grads)
    answer.gradients = [
        torch.zeros_like(x) if g is None else g.detach().clone() for g, x in zip(grads, leaves, strict=True)
    ]
    lines = answer.lines
    answer.notes += watched.notes() or changed(
        "gradient-overwritten",
        "backward writes into the gradient of result {}",
        handed,
        answer.cotangents,
        lines,
    )
    answer.notes += changed("operand-overwritten", "backward writes into operand {}", given, before, lines)
    answer.notes += changed(
        "saved-buffer-overwritten", "backward writes into result {}, which others read", results, out, lines
    )
    return answer


def filled(results: Sequence[Tensor]) -> list[Tensor]:
    """Copies of results, of which those that are still on their way are waited for."""
    return [y.detach().clone().resolve_conj() for y in results]
