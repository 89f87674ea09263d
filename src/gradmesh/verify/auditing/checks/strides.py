"""Non-contiguous operands and gradients: expanded, transposed, slices of larger tensors."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import FrameType

from torch import Tensor

from gradmesh.errors import ArgumentError, RankError
from gradmesh.verify.auditing.case import Case, FunctionRaisedError
from gradmesh.verify.auditing.operands import LAYOUTS, in_layout
from gradmesh.verify.auditing.pool import RanksLostError
from gradmesh.verify.auditing.probes import Answer, Probe, attempt, cotangents, filled, leaves_of
from gradmesh.verify.auditing.readings import distance
from gradmesh.verify.auditing.report import Finding
from gradmesh.verify.auditing.subject import Subject, differentiable_call
from gradmesh.verify.gradients.calls import is_raw

__all__ = ["strides"]


@dataclass
class _Difference(Answer):
    """The difference of results and gradients from those of contiguous tensors with the same values."""

    tried: bool = False
    off: float = 0.0
    off_back: float = 0.0


KINDS_OF = ("strided-operand", "strided-gradient")


@dataclass
class _Calls(Answer):
    """Whether a rank's function calls torch.distributed with tensors."""

    raw: bool = False


def strides(case: Case) -> Iterator[Finding]:
    """The same values in other memory layouts; also on processes with Gloo if torch.distributed is called.

    Thread ranks respect strides. Gloo treats memory as contiguous, or crashes the process.
    """
    found = [*_strided(case, KINDS_OF, "")]
    yield from found
    left = tuple(kind for kind in KINDS_OF if all(one.kind != kind for one in found))
    if not (left and case.gloo and case.pool.backend == "threads" and _calls_torch(case)):
        return
    with case.pool.on("gloo") as pool:
        try:
            pool.begin()
        except (ArgumentError, RankError) as error:
            why = str(error).splitlines()[0].removeprefix("gradmesh.launch: ")
            case.left_out |= dict.fromkeys(left, f"not on Gloo, because build fails there: {why}")
            return
        yield from _strided(replace(case, pool=pool), left, "on processes with Gloo, ")


def _calls_torch(case: Case) -> bool:
    """Whether forward or backward calls torch.distributed on any rank."""
    try:
        answers = case.answered(calls, case.probe(21))[0]
    except (FunctionRaisedError, RanksLostError):
        return False
    return any(isinstance(answer, _Calls) and answer.raw for answer in answers)


def calls(probe: Probe) -> list[Answer]:
    """Run forward and backward, and detect calls of torch.distributed."""
    return attempt([probe], _look)


def _look(subject: Subject, probe: Probe) -> Answer:
    found = _Calls()

    def called(frame: FrameType, event: str, _: object) -> None:
        found.raw |= event == "call" and is_raw(frame.f_code)

    leaves, before = [x.requires_grad_() for x in leaves_of(subject, probe)], sys.getprofile()
    with differentiable_call(subject) as backward:
        sys.setprofile(called)
        try:
            results = subject.call([leaf.clone() for leaf in leaves])
            backward(results, leaves, cotangents(subject, probe, results))
        finally:
            sys.setprofile(before)
    return found


def _strided(case: Case, kinds: Sequence[str], where: str) -> Iterator[Finding]:
    for kind in kinds:
        of_gradient = kind == "strided-gradient"
        wrong: dict[str, tuple[int, ...]] = {}
        raised: dict[str, FunctionRaisedError | RanksLostError] = {}
        for layout in LAYOUTS:
            try:
                ranks = case.answered(beside, case.probe(21), layout, of_gradient)[0]
            except (FunctionRaisedError, RanksLostError) as error:
                raised[layout] = error
                if isinstance(error, RanksLostError) or any(t.waited for t in error.failures.values()):
                    break  # each further layout would run into the timeout too
                continue
            found = [a for a in ranks if isinstance(a, _Difference) and a.tried]
            off = tuple(
                r
                for r, a in enumerate(ranks)
                if isinstance(a, _Difference) and max(a.off, a.off_back) > case.tolerance
            )
            if found and off:
                wrong[layout] = off
        if wrong:
            layouts = "; ".join(LAYOUTS[layout] for layout in wrong)
            what = "incoming gradient" if of_gradient else "operand"
            text = f"{where}silently wrong if the {what} is {layouts}"
            yield Finding(kind, text, next(iter(wrong.values())), case.line)
        if raised:
            layout, first = next(iter(raised.items()))
            what = "incoming gradient" if of_gradient else "operand"
            yield case.failure(kind, first, f"{where}if the {what} is {LAYOUTS[layout]}")


def beside(probe: Probe, layout: str, of_gradient: bool) -> list[Answer]:
    """Run with contiguous tensors, then with the same values in a layout."""
    return attempt([probe], lambda subject, probe: _beside(subject, probe, layout, of_gradient))


def _beside(subject: Subject, probe: Probe, layout: str, of_gradient: bool) -> Answer:
    found = _Difference()
    runs = []
    for strided in (False, True):
        leaves = [x.requires_grad_() for x in leaves_of(subject, probe)]
        with differentiable_call(subject) as backward:
            given: list[Tensor] = []
            for leaf in leaves:
                laid = None if of_gradient else in_layout(leaf, layout)
                found.tried |= laid is not None
                given.append(leaf.clone() if laid is None else laid if strided else laid.contiguous().clone())
            results = subject.call(given)
            handed: list[Tensor] = []
            for y in cotangents(subject, probe, results):
                laid = in_layout(y, layout) if of_gradient else None
                found.tried |= laid is not None
                handed.append(y if laid is None else laid if strided else laid.contiguous().clone())
            out = filled(results)
            runs.append((out, backward(results, leaves, handed)))
    (plain, grads), (other, other_grads) = runs
    found.off = max((distance(a, b) for a, b in zip(plain, other, strict=True)), default=0.0)
    for a, b in zip(grads, other_grads, strict=True):
        if a is not None or b is not None:
            found.off_back = max(found.off_back, float("inf") if a is None or b is None else distance(a, b))
    return found
