"""Second-order gradients.

The gradient of a linear map is its adjoint applied to the cotangent; differentiating that gives the map again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradmesh.types import Type
from gradmesh.verify.auditing.case import Case, FunctionRaisedError, worst_failure
from gradmesh.verify.auditing.pool import RanksLostError
from gradmesh.verify.auditing.probes import Answer, Probe, attempt, cotangents, leaves_of, mapped
from gradmesh.verify.auditing.readings import Reading, agree, distance
from gradmesh.verify.auditing.report import Finding
from gradmesh.verify.auditing.subject import IN_BACKWARD, Subject, differentiable_call

__all__ = ["second_order"]


KINDS_OF = ("second-order-raises", "second-order-wrong", "second-order-lost")
"""The kinds that this check reports."""


@dataclass
class _Second(Answer):
    """The outcome of double backward.

    `operands` are directions u, `results` is A u, and `back` is the gradient of <A* y, u> with respect to y.
    """

    back: list[Tensor] = field(default_factory=list)
    kept: bool = False
    arrived: bool = False


def second_order(case: Case) -> Iterator[Finding]:
    """The second-order law; must hold under one of the readings that hold in first order."""
    worst: Finding | None = None
    if not case.arrows:
        case.left_out |= dict.fromkeys(KINDS_OF, "backward is not an adjoint in first order")
    for arrow in case.arrows:
        try:
            ranks = case.answered(second, [case.probe(41 + n, arrow.pattern) for n in range(2)])
        except (FunctionRaisedError, RanksLostError) as error:
            first = worst_failure(error.failures) if isinstance(error, FunctionRaisedError) else None
            if first is not None and first.stage == "forward" and not first.waited:
                case.left_out |= dict.fromkeys(KINDS_OF, f"forward raises there: {first.first}")
                return
            worst = worst or case.failure("second-order-raises", error, "under create_graph=True")
            continue
        found = _check_reading(case, arrow, [[a for a in row if isinstance(a, _Second)] for row in ranks])
        if found is None:
            return
        worst = found if worst is None or worst.kind == "second-order-raises" else worst
    if worst is not None:
        yield worst


def _check_reading(case: Case, arrow: Reading, probes: Sequence[Sequence[_Second]]) -> Finding | None:
    every = [answer for ranks in probes for answer in ranks]
    if all(_zero(answer.results) for answer in every):
        return None
    if not any(answer.arrived for answer in every):
        what = (
            "has no graph"
            if not any(answer.kept for answer in every)
            else "does not depend on the incoming gradient"
        )
        return Finding("second-order-lost", f"the gradient {what}, as {arrow}", (), case.line)
    off: dict[int, float] = {}
    for ranks in probes:
        back, wanted = [a.back for a in ranks], [a.results for a in ranks]
        for index, kind in enumerate(arrow.dst):
            if kind in (Type.R, Type.I) and not agree(back, index, case.tolerance):
                off[0] = max(off.get(0, 0.0), 1.0)
            if kind is Type.P:
                total = [sum((row[index] for row in rows), torch.zeros(())) for rows in (back, wanted)]
                error = distance(*total)
                if error > case.tolerance:
                    off[0] = max(off.get(0, 0.0), error)
                continue
            for rank, (got, want) in enumerate(zip(back, wanted, strict=True)):
                error = distance(got[index], want[index])
                if error > case.tolerance:
                    off[rank] = max(off.get(rank, 0.0), error)
    if not off:
        return None
    dead = [rank for rank in range(len(probes[0])) if not any(ranks[rank].arrived for ranks in probes)]
    if dead and all(_zero(ranks[rank].back) for rank in dead for ranks in probes) and set(off) <= set(dead):
        return Finding(
            "second-order-lost",
            f"on some ranks the gradient is not differentiable, as {arrow}",
            tuple(dead),
            case.line,
        )
    text = f"the second-order gradient has an error of {max(off.values()):.0%}, as {arrow}"
    return Finding("second-order-wrong", text, tuple(sorted(off)), case.line)


def _zero(tensors: Sequence[Tensor]) -> bool:
    return all(not t.numel() or float(t.abs().max()) == 0.0 for t in tensors)


def second(probes: Sequence[Probe]) -> list[Answer]:
    """Run double backward with respect to the incoming gradient."""
    return attempt(probes, _second)


def _second(subject: Subject, probe: Probe) -> Answer:
    u, image = mapped(subject, probe)
    found = _Second(operands=u, results=image)
    leaves = [x.requires_grad_() for x in leaves_of(subject, probe)]
    with differentiable_call(subject) as backward:
        results = subject.call([leaf.clone() for leaf in leaves])
        y = [c.requires_grad_() for c in cotangents(subject, probe, results)]
        handed = [c.clone() for c in y]  # not leaves, because torch forbids in-place writes into leaves
        grads = backward(results, leaves, handed, create_graph=True)
        pairs = [(g, v) for g, v in zip(grads, u, strict=True) if g is not None and g.requires_grad]
        found.kept = bool(pairs)
        back: list[Tensor | None] = [None] * len(y)
        if subject.ordered:
            back = backward([g for g, _ in pairs], y, [v.clone() for _, v in pairs])
        elif pairs:
            # backward() and not grad(..., y): the error node of once_differentiable is not on a path to y.
            try:
                torch.autograd.backward([g for g, _ in pairs], [v.clone() for _, v in pairs])
            except Exception as error:
                error.add_note(IN_BACKWARD)
                raise
            back = [c.grad for c in y]
    found.arrived = any(g is not None and bool(g.abs().max() > 0) for g in back if g is None or g.numel())
    found.back = [
        torch.zeros_like(c) if g is None else g.detach().clone() for g, c in zip(back, y, strict=True)
    ]
    return found
