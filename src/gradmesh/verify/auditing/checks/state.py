"""Gradients that depend on program state at the time of backward."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from gradmesh.verify.auditing.case import Case, FunctionRaisedError
from gradmesh.verify.auditing.pool import RanksLostError
from gradmesh.verify.auditing.probes import Answer, Point, Probe, attempt, cotangents, leaves_of
from gradmesh.verify.auditing.readings import distance
from gradmesh.verify.auditing.report import Finding
from gradmesh.verify.auditing.subject import (
    Subject,
    current_subject,
    differentiable_call,
    nodes,
    python_function,
)
from gradmesh.verify.auditing.switches import restore, set_switch, switches

__all__ = ["global_convention"]


def global_convention(case: Case) -> Iterator[Finding]:
    """Change each switch of the function's modules between forward and backward, and compare the gradients."""
    places: list[int | None] = [None] if case.pool.begin()[0].can_change else []
    try:
        found = case.pool.ask(look_for_switches)[0]
        places += range(len(found))
        if not places:
            return
        plain = _gradients(case, None, switched=False)
    except (
        FunctionRaisedError,
        RanksLostError,
    ) as error:  # forward and backward run in separate calls here, which DDP does not support
        why = error.text if isinstance(error, RanksLostError) else str(error)
        case.left_out["global-convention"] = f"backward in a separate call fails: {why}"
        return
    for place in places:
        try:
            changed = _gradients(case, place, switched=True)
        except (
            FunctionRaisedError,
            RanksLostError,
        ):  # a switch that makes backward raise does not change the gradient
            case.pool.ask(look_for_switches)  # again, because the ranks may have been replaced
            continue
        finally:
            restore()  # thread ranks that are gone may have left a switch changed in this process
        off = [
            rank
            for rank, (a, b) in enumerate(zip(plain, changed, strict=True))
            if any(distance(x, y) > case.tolerance for x, y in zip(a, b, strict=True))
        ]
        if off:
            what = "entering `change` of build" if place is None else found[place]
            yield Finding(
                "global-convention", f"{what}, after forward, changes the gradient", tuple(off), case.line
            )


def _gradients(case: Case, place: int | None, switched: bool) -> list[list[Tensor]]:
    """Each rank's gradients, optionally with a switch changed after forward."""
    case.answered(go_forward, case.probe(91))
    if switched:
        case.pool.ask(change, place, True)
    try:
        return [answer.gradients for answer in case.answered(go_backward)[0]]
    finally:
        if switched:
            case.pool.ask(change, place, False)


def go_forward(probe: Probe) -> list[Answer]:
    """Run forward and keep its state for `go_backward`."""
    return attempt([probe], _forward)


def _forward(subject: Subject, probe: Probe) -> Answer:
    leaves = [x.requires_grad_() for x in leaves_of(subject, probe)]
    stack = contextlib.ExitStack()
    backward = stack.enter_context(differentiable_call(subject))
    results = subject.call([leaf.clone() for leaf in leaves])
    subject.kept["forward"] = stack, backward, results, leaves, cotangents(subject, probe, results)
    return Answer()


def go_backward() -> list[Answer]:
    """Run backward of the kept forward."""
    return attempt([Probe(0)], _backward)


def _backward(subject: Subject, _: Probe) -> Answer:
    stack, backward, results, leaves, handed = subject.kept.pop("forward")
    with stack:
        grads = backward(results, leaves, handed)
    return Answer(
        gradients=[torch.zeros_like(x) if g is None else g for g, x in zip(grads, leaves, strict=True)]
    )


def look_for_switches() -> list[str]:
    """Find the switches that the function's code reads; returns a description of each change."""
    subject = current_subject()
    leaves = [x.requires_grad_() for x in leaves_of(subject, Probe(0, point=Point(1.0)))]
    with differentiable_call(subject) as backward:
        results = subject.call([leaf.clone() for leaf in leaves])
        functions = [python_function(node) for node in nodes(results)]
        if subject.ordered:
            backward(results, leaves, [torch.zeros_like(y) for y in results])
    subject.kept["switches"] = found = switches(subject.fn, *dict.fromkeys(filter(None, functions)))
    return [str(switch) for switch in found]


def change(place: int | None, forth: bool) -> None:
    """Change or restore a switch; `place` None: enter or exit the context manager `change` of `build`."""
    subject = current_subject()
    if place is not None:
        found = subject.kept.get("switches", ())
        if place < len(found):
            set_switch(found[place], forth)
    elif not forth:
        context = subject.kept.pop("change", None)
        if context is not None:
            context.__exit__(None, None, None)
    elif subject.change is not None:
        subject.kept["change"] = context = subject.change()
        context.__enter__()
