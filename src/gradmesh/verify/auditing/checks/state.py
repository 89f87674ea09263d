"""A gradient that depends on the program's state at the time of backward."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from gradmesh.verify.auditing.case import Case, RefusedError
from gradmesh.verify.auditing.pool import LostError
from gradmesh.verify.auditing.probes import Answer, Point, Probe, attempt, cotangents, leaves_of
from gradmesh.verify.auditing.readings import distance
from gradmesh.verify.auditing.report import Finding
from gradmesh.verify.auditing.subject import Subject, call_differentiably, held, nodes, own_function
from gradmesh.verify.auditing.switches import restore, switches, turn_switch

__all__ = ["global_convention"]


def global_convention(case: Case) -> Iterator[Finding]:
    """Change every switch of the function's modules between forward and backward, and look at the gradient."""
    places: list[int | None] = [None] if case.pool.begin()[0].can_change else []
    try:
        told = case.pool.ask(look_for_switches)[0]
        places += range(len(told))
        if not places:
            return
        plain = _gradients(case, None, turned=False)
    except (
        RefusedError,
        LostError,
    ) as error:  # backward apart from forward: DDP waits for the next forward there
        why = error.text if isinstance(error, LostError) else str(error)
        case.left_out["global-convention"] = f"as it cannot be asked: {why}"
        return
    for place in places:
        try:
            changed = _gradients(case, place, turned=True)
        except (RefusedError, LostError):  # a switch that makes backward raise does not change the gradient
            case.pool.ask(look_for_switches)  # of the ranks that are there now
            continue
        finally:
            restore()  # ranks that are threads may be gone, and have changed what this thread reads
        off = [
            rank
            for rank, (a, b) in enumerate(zip(plain, changed, strict=True))
            if any(distance(x, y) > case.tolerance for x, y in zip(a, b, strict=True))
        ]
        if off:
            what = "what build returned to change it" if place is None else told[place]
            yield Finding(
                "global-convention", f"{what}, after forward, changes the gradient", tuple(off), case.line
            )


def _gradients(case: Case, place: int | None, turned: bool) -> list[list[Tensor]]:
    """Each rank's gradients, with something changed after forward."""
    case.answered(go_forward, case.probe(91))
    if turned:
        case.pool.ask(change, place, True)
    try:
        return [answer.gradients for answer in case.answered(go_backward)[0]]
    finally:
        if turned:
            case.pool.ask(change, place, False)


def go_forward(probe: Probe) -> list[Answer]:
    """Forward, kept for `go_backward`."""
    return attempt([probe], _forward)


def _forward(subject: Subject, probe: Probe) -> Answer:
    leaves = [x.requires_grad_() for x in leaves_of(subject, probe)]
    stack = contextlib.ExitStack()
    backward = stack.enter_context(call_differentiably(subject))
    results = subject.call([leaf.clone() for leaf in leaves])
    subject.kept["forward"] = stack, backward, results, leaves, cotangents(subject, probe, results)
    return Answer()


def go_backward() -> list[Answer]:
    """The backward of what is kept."""
    return attempt([Probe(0)], _backward)


def _backward(subject: Subject, _: Probe) -> Answer:
    stack, backward, results, leaves, handed = subject.kept.pop("forward")
    with stack:
        grads = backward(results, leaves, handed)
    return Answer(
        gradients=[torch.zeros_like(x) if g is None else g for g, x in zip(grads, leaves, strict=True)]
    )


def look_for_switches() -> list[str]:
    """Find the switches that the function's code reads, and tell what would be done to each."""
    subject = held()
    leaves = [x.requires_grad_() for x in leaves_of(subject, Probe(0, point=Point(1.0)))]
    with call_differentiably(subject) as backward:
        results = subject.call([leaf.clone() for leaf in leaves])
        functions = [own_function(node) for node in nodes(results)]
        if subject.ordered:
            backward(results, leaves, [torch.zeros_like(y) for y in results])
    subject.kept["switches"] = found = switches(subject.fn, *dict.fromkeys(filter(None, functions)))
    return [str(switch) for switch in found]


def change(place: int | None, forth: bool) -> None:
    """Turn a switch, or enter what `build` returned to change the program's state; and back."""
    subject = held()
    if place is not None:
        found = subject.kept.get("switches", ())
        if place < len(found):
            turn_switch(found[place], forth)
    elif not forth:
        context = subject.kept.pop("change", None)
        if context is not None:
            context.__exit__(None, None, None)
    elif subject.change is not None:
        subject.kept["change"] = context = subject.change()
        context.__enter__()
