"""On a rank: forward and backward on random operands, and checks for forbidden writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gradmesh.verify.auditing.operands import draw
from gradmesh.verify.auditing.subject import Failure, Subject, current_subject, differentiable_call, of_error
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

_OTHER_OWNER = 100_000
"""The owner of values that a rank draws in place of its own."""
_COTANGENTS = 1000
"""Seed offset of the gradients of results."""


@dataclass(frozen=True)
class Point:
    """Where a nonlinear function is differentiated, and with which step.

    Attributes:
        step: the step of central differences; 0 for a linear function, which is its own derivative.
        shared: values of the operands that must be identical on every rank; for others each rank uses its own.
        rotated: for each rank, operands that replace its own.
        own: whether the point is the rank's own operands; False: it is zero.
    """

    step: float = 0.0
    shared: tuple[Tensor | None, ...] = ()
    rotated: tuple[tuple[Tensor, ...], ...] = ()
    own: bool = True


@dataclass(frozen=True)
class Probe:
    """One experiment: which operands and gradients to draw for a forward and backward run.

    Attributes:
        seed: different seeds give different values.
        alike: which operands are identical on every rank.
        alike_out: which gradients of results are identical on every rank.
        whole: whether values are small integers.
        complex: whether to draw complex operands in place of real ones.
        rotate: rotation: each rank draws the operands of the rank that is `rotate` further in the ring of `ranks`.
        rotate_out: the same for the gradients of results.
        ranks: the number of participating ranks; needed for a rotation.
        other: a rank that draws different operands than usual, or -1.
        other_out: the same for the gradients of results.
        only: the index of the one operand or result that `rotate` and `other` apply to; -1: all.
        point: where a nonlinear function is differentiated.
    """

    seed: int
    alike: tuple[bool, ...] = ()
    alike_out: tuple[bool, ...] = ()
    whole: bool = False
    complex: bool = False
    rotate: int = 0
    rotate_out: int = 0
    ranks: int = 1
    other: int = -1
    other_out: int = -1
    only: int = -1
    point: Point = field(default_factory=Point)


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


def configure(**settings: Any) -> None:
    """Set attributes of this rank's subject."""
    subject = current_subject()
    for name, value in settings.items():
        setattr(subject, name, value)


def attempt(probes: Sequence[Probe], ask: Callable[[Subject, Probe], Answer]) -> list[Answer]:
    """Run probes one after another, up to the first that raises."""
    answers: list[Answer] = []
    subject = current_subject()
    for probe in probes:
        answer = Answer()
        try:
            answer = ask(subject, probe)
        except (Exception, SystemExit) as error:
            answer.failure = of_error(error)
        answers.append(answer)
        if answer.failure is not None:
            break
    return answers


def first_order(probes: Sequence[Probe]) -> list[Answer]:
    """Forward and backward of each probe."""
    return attempt(probes, _first_order)


def tangents(probes: Sequence[Probe]) -> list[Answer]:
    """Forward only."""
    return attempt(probes, lambda subject, probe: Answer(*mapped(subject, probe)))


def drawn(subject: Subject, probe: Probe) -> list[Tensor]:
    """The operands of a probe."""
    same = probe.alike or (False,) * len(subject.operands)
    return [
        draw(
            subject.shape(i),
            subject.operand_dtype(i, probe.complex),
            probe.seed + 31 * i,
            -1 if same[i] else _owner(subject, probe, i, probe.rotate, probe.other),
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
            -1 if same[i] else _owner(subject, probe, i, probe.rotate_out, probe.other_out),
            whole=probe.whole,
        )
        for i, y in enumerate(results)
    ]


def _owner(subject: Subject, probe: Probe, index: int, rotate: int, other: int) -> int:
    if probe.only not in (-1, index):
        return subject.rank
    if subject.rank == other:
        return _OTHER_OWNER
    return (subject.rank + rotate) % probe.ranks if rotate else subject.rank


def leaves_of(subject: Subject, probe: Probe) -> list[Tensor]:
    """The operands to call the function with: random ones, or the point of differentiation."""
    own = probe.point.step and probe.point.own
    return point_of(subject, probe) if own else [x.clone() for x in drawn(subject, probe)]


def point_of(subject: Subject, probe: Probe) -> list[Tensor]:
    """The point where a nonlinear function is differentiated."""
    same = probe.alike or (False,) * len(subject.operands)
    values = []
    for i in range(len(subject.operands)):
        shared = probe.point.shared[i] if probe.point.shared and same[i] else None
        shared = probe.point.rotated[subject.rank][i] if probe.point.rotated else shared
        value = subject.inputs[subject.operands[i]].detach() if shared is None else shared
        value = value.to(subject.operand_dtype(i, probe.complex))
        values.append(value.clone() if probe.point.own else torch.zeros_like(value))
    return values


def mapped(subject: Subject, probe: Probe) -> tuple[list[Tensor], list[Tensor]]:
    """The drawn operands, and the function (or its derivative) applied to them."""
    x = drawn(subject, probe)
    if not probe.point.step:
        return x, filled(subject.call([v.clone() for v in x]))
    base, step = point_of(subject, probe), probe.point.step
    with torch.no_grad():
        ahead = filled(subject.call([b + step * v for b, v in zip(base, x, strict=True)]))
        behind = filled(subject.call([b - step * v for b, v in zip(base, x, strict=True)]))
    return x, [difference(a, b) / (2 * step) for a, b in zip(ahead, behind, strict=True)]


def difference(a: Tensor, b: Tensor) -> Tensor:
    """A - b, and 0 where both are the same infinity, as in masked scores."""
    return torch.where(a == b, torch.zeros_like(a), a - b)


def _first_order(subject: Subject, probe: Probe) -> Answer:
    answer = Answer()
    if probe.point.step:
        answer.operands, answer.results = mapped(subject, probe)
    else:
        answer.operands = drawn(subject, probe)
    leaves = [x.requires_grad_() for x in leaves_of(subject, probe)]
    with differentiable_call(subject) as backward:
        given = [leaf.clone() for leaf in leaves]  # not leaves, so that in-place writes are allowed
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
        "saved-buffer-overwritten",
        "backward writes into result {}, which other code may read",
        results,
        out,
        lines,
    )
    return answer


def filled(results: Sequence[Tensor]) -> list[Tensor]:
    """Copies of the results; waits for those that are still pending."""
    return [y.detach().clone().resolve_conj() for y in results]
