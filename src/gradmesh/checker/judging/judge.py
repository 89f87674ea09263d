"""The judge: from tapes to a verdict."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from gradmesh.checker.findings import Finding, Status, Verdict
from gradmesh.checker.judging.added import added_before_sums
from gradmesh.checker.judging.averages import notes_on_averages
from gradmesh.checker.judging.calls import faults_of_calls, overwritten
from gradmesh.checker.judging.context import Context, with_text
from gradmesh.checker.judging.cuts import cut_before_collectives
from gradmesh.checker.judging.endings import endings
from gradmesh.checker.judging.gradients import faults_of_gradients, scaled_alone, scales, wrong_ones
from gradmesh.checker.judging.parameters import gotten
from gradmesh.checker.judging.rounding import forgive_rounding
from gradmesh.checker.judging.segments import Segment, segments
from gradmesh.checker.judging.settings import settings_apart, unused_plateaus
from gradmesh.checker.judging.targets import targets_apart
from gradmesh.checker.judging.truth import Truth, truth_of
from gradmesh.checker.judging.values import (
    drifted,
    drifted_later,
    masks,
    never_same,
    overwritten_steps,
    parted,
    parted_by_closure,
    same_data,
    statistics,
    steps_apart,
    tied,
)
from gradmesh.checker.recording.tape import Root, Tape
from gradmesh.checker.replay.engine import UnfaithfulError, run_again

__all__ = ["judged"]


def judged(
    tapes: Sequence[Tape | None],
    calls: Sequence[Sequence[str]],
    output: Sequence[str],
    *,
    stuck: bool,
    killed: Mapping[int, int],
    ranks: int,
    see: Callable[[Context], None] = lambda _: None,
) -> Verdict:
    """What is wrong with a program that was recorded.

    Args:
        tapes: of each rank; None where it did not end.
        calls: each rank's collectives, as its log has them.
        output: what each rank printed.
        stuck: whether the ranks were ended.
        killed: the signals that killed ranks before that, by rank.
        ranks: how many there are.
        see: is shown each step that is judged.
    """
    found = endings(tapes, calls, output, stuck, killed)
    notes: list[str] = []
    followed = list[int]()
    there = [tape for tape in tapes if tape is not None]
    if len(there) == ranks and not found:
        found += steps_apart(there)
    if len(there) == ranks and not found:
        every = segments(there)
        for number, segment in enumerate(every, 1):
            if not segment.whole:
                continue
            more = _step(there, segment, number, notes, see, every[number : number + 1], followed)
            if segment.manual_calls and not more:
                more = parted(there, segment, every[number : number + 1])
            found += more
            if any(each.severity == "error" for each in more):
                break  # what follows is a consequence
        if not found:
            found += parted_by_closure(there)
        found += settings_apart(there)
        notes += unused_plateaus(there)
        idle = [str(tape.rank) for tape in there if not tape.steps]
        if 0 < len(idle) < len(there) and not found:
            notes.append(
                f"no step was seen on rank {', '.join(idle)}: nothing is said of the others' gradients"
            )
        if not any(tape.steps for tape in there) and not found:
            notes.append("no step of an optimizer was seen: nothing is said of gradients")
    steps = min((tape.steps for tape in there), default=0)
    failed = stuck or len(there) < ranks or any(tape.ended == "raised" for tape in there)
    status: Status = "stopped" if failed else "complete"
    return Verdict(
        _once(found), tuple(dict.fromkeys(notes)), ranks, steps, {}, status, min(steps, len(followed))
    )


def _step(
    tapes: Sequence[Tape],
    segment: Segment,
    number: int,
    notes: list[str],
    see: Callable[[Context], None],
    following: Sequence[Segment],
    followed: list[int],
) -> list[Finding]:
    try:
        again = run_again(segment.parts)
    except (UnfaithfulError, *_UNFORESEEN) as error:
        notes.append(f"step {number}{_backward(tapes, segment)} could not be followed: {_line(error)}")
        return []
    try:
        truth = truth_of(again)
    except _UNFORESEEN as error:
        context = Context(tapes, segment, again, Truth(torch.zeros(()), 0, [], []), [])
        if found := overwritten(context):
            return found
        notes.append(f"step {number}{_backward(tapes, segment)} could not be differentiated: {_line(error)}")
        return []
    if truth is None:
        notes.append(
            f"step {number}{_backward(tapes, segment)}: no backward began at a loss that was followed"
        )
        return []
    context = Context(tapes, segment, again, truth, [])
    try:
        context.got = gotten(segment, again, truth, scales(tapes, segment), notes)
        see(context)
        return _judged_step(context, number, notes, following, followed)
    except _UNFORESEEN as error:
        notes.append(f"not analysed: step {number} ({type(error).__name__}: {_line(error)})")
        return []


def _judged_step(
    context: Context, number: int, notes: list[str], following: Sequence[Segment], followed: list[int]
) -> list[Finding]:
    segment, again, truth = context.segment, context.again, context.truth
    lost = {
        f"step {number}, rank {at}: {each.what} ({context.place(at, each.site)})"
        for at, rank in enumerate(again.ranks)
        for each in rank.lost
    }
    found = [*masks(context), *statistics(context), *same_data(context), *targets_apart(context, following)]
    if number == 1:  # later on gains of one may be alike by chance: Adam's first step is one of two for each
        found += tied(context)
    if lost:
        notes.extend(sorted(lost))
        notes.append(f"step {number}: nothing is said of its gradients")
        return found
    notes.extend(cut_before_collectives(context))
    apart = never_same(context)
    found += apart
    wrong = wrong_ones(context)
    if wrong and forgive_rounding(context, wrong):
        wrong = wrong_ones(context)
    if truth.unclear and any(got.kind == "bent" for got in wrong):
        notes.append(
            f"step {number}: what the backward of {', '.join(truth.unclear)} makes of a gradient is not known: "
            "gradients that come through it are not compared"
        )
        wrong = [got for got in wrong if got.kind != "bent"]
    if wrong and segment.manual_calls:
        place = context.place(0, segment.steps[0][0].site)
        notes.append(
            f"step {number} is written by hand at {place}, and not with what is in .grad: its gradients are not checked"
        )
        return found
    followed.append(number)
    alone = scaled_alone(context)
    if alone:
        return [*found, *alone]  # what else differs may come of it
    if wrong and not apart:
        named = {each.subject for each in found if each.rule.id == "GM204"}
        wrong = [got for got in wrong if got.name not in named]
        by_calls = faults_of_calls(context, wrong) if wrong else []
        found += by_calls or faults_of_gradients(context, wrong)
    elif not apart:
        found += added_before_sums(context, []) or faults_of_gradients(context, [])
        found += (
            drifted(context.got, context)
            or drifted_later(context, following)
            or overwritten_steps(context, following)
        )
        notes.extend(notes_on_averages(context))
    for got in context.got:
        if got.kind == "infinite":
            notes.append(f"step {number}: the gradient of {got.name} is not finite, and is not compared")
        if got.kind == "unknown":
            notes.append(
                f"{got.name} is stepped, and it is not seen where it is used: its gradient is not compared"
            )
        if got.kind == "changed":
            what = next(part.param.changed for part in got.parts if part.param.changed is not None)
            rank = next(part.rank for part in got.parts if part.param.changed is not None)
            place = context.place(rank, what.site)
            where = f" at {place}" if place is not None else ""
            notes.append(
                f"the gradient of {got.name} is changed before the step ({what.what}{where}): "
                "whether that is intended is unknown, so it is not compared"
            )
        if got.kind == "ambiguous":
            notes.append(
                f"{got.name} begins as one number everywhere: it is unknown whether the ranks share it"
            )
    return found


_UNFORESEEN = (
    RuntimeError,
    NotImplementedError,
    KeyError,
    IndexError,
    TypeError,
    ValueError,
    AttributeError,
    AssertionError,
    ArithmeticError,
)
"""What the analysis of one program may raise: it becomes a note, and the others' findings stand."""


def _line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _backward(tapes: Sequence[Tape], segment: Segment) -> str:
    """Where the first backward of a step is, in words."""
    places = (
        with_text(tape.places, event.site)
        for tape, part in zip(tapes, segment.parts, strict=True)
        for event in part
        if isinstance(event, Root)
    )
    place = next((place for place in places if place is not None), None)
    return f" (backward at {place})" if place is not None else ""


def _once(found: Sequence[Finding]) -> tuple[Finding, ...]:
    seen: dict[tuple[str, str, str], Finding] = {}
    for each in found:
        seen.setdefault((each.rule.id, str(each.at), each.subject), each)
    return tuple(sorted(seen.values(), key=lambda each: (each.severity != "error", each.rule.id)))
