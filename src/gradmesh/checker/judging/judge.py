"""The judge: from tapes to a verdict."""

from __future__ import annotations

import ast
import contextlib
import linecache
import re
import signal
import sys
import sysconfig
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from gradmesh._util.call_sites import is_of_the_program
from gradmesh.checker.findings import Finding, Place, Redistribution, Status, Verdict
from gradmesh.checker.judging.context import (
    Context,
    cut_before_collectives,
    finding,
    listed,
    with_history,
    with_text,
)
from gradmesh.checker.judging.functions import (
    added_before_sums,
    faults_of_calls,
    overwritten,
    rounding,
    used_apart,
)
from gradmesh.checker.judging.origins import first_not_finite
from gradmesh.checker.judging.parameters import Got, Segment, Truth, first_line, gotten, segments, truth_of
from gradmesh.checker.judging.sums_and_factors import (
    faults_of_gradients,
    label_losses,
    means_of_means,
    miscounted_norms,
    notes_on_averages,
    notes_on_scaled,
    repeated_terms,
    reported,
    scaled_alone,
    scales,
    wrong_ones,
)
from gradmesh.checker.judging.values import (
    drifted,
    drifted_later,
    idle_apart,
    masks,
    misannotated,
    mixed_shards,
    modes_apart,
    never_same,
    order_repeats,
    overwritten_steps,
    parted,
    parted_by_writing,
    parted_unseen,
    same_data,
    sends_nothing,
    settings_apart,
    shares_overlap,
    statistics,
    steps_apart,
    targets_apart,
    tied,
    unused_plateaus,
    unwaited,
)
from gradmesh.checker.replay import UnfaithfulError, UnpairedError, run_again
from gradmesh.checker.trace import Recording, Root, Step, Tape, label_stepped, most_memory

_FOLLOWS = (
    "Connection closed by peer",
    "Connection reset",
    "Broken pipe",
    "Timed out",
    "timed out",
    "Application timeout",
)
"""What a rank says when another has gone."""

_FRAME = re.compile(r'^  File "(.*)", line (\d+) in ', re.MULTILINE)
"""A line of the stack that Python prints when a signal kills it."""

_PYTHON = sysconfig.get_path("stdlib")

_SAME_SHAPES = ("all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter")


def endings(run: Recording) -> list[Finding]:
    """What is wrong with how the ranks ended."""
    tapes, calls, output, killed = run.tapes, run.calls, run.output, run.killed
    raised = [(rank, tape) for rank, tape in enumerate(tapes) if tape is not None and tape.ended == "raised"]
    first = [pair for pair in raised if not any(text in pair[1].error for text in _FOLLOWS)]
    stopped = {rank for rank, tape in enumerate(tapes) if tape is not None and tape.ended == "stopped"}
    ended = all(tape is not None and tape.ended != "raised" for tape in tapes)
    if ended:
        return []
    dead = sorted(rank for rank in killed if tapes[rank] is None)
    # Gloo aborts where what comes does not fit.
    aborted = bool(dead) and killed[dead[0]] == signal.SIGABRT
    if dead and not first and not (aborted and _differing(calls, stopped)):
        return [_killed(dead[0], killed[dead[0]], output[dead[0]])]
    of_calls = (
        run.stuck or not first or any(text in first[0][1].error for text in ("size", "shape", "mismatch"))
    )
    differ = _differing(calls, stopped) if of_calls else None
    if differ is not None:
        return [differ]
    if first or raised:
        rank, tape = (first or raised)[0]
        at = with_text(tape.places, tape.raised_at)
        if tape.not_used and not all(each is not None and each.not_used == tape.not_used for each in tapes):
            modules = sorted({name.rpartition(".")[0] or name for name in tape.not_used})
            said = (
                f"the loss of rank {rank} does not depend on {', '.join(tape.not_used)}, and DDP waits for their "
                "gradients on every rank"
            )
            remedy = (
                f"Add gm.nn.skipped(module) to the loss of a rank that does not use {' or '.join(modules)}, or pass "
                "find_unused_parameters=True to DistributedDataParallel."
            )
            return [finding("GM401", said, at, None, [rank], remedy=remedy)]
        said, got, remedy = tape.error.splitlines()[0], "", ""
        if tape.error.startswith("gradmesh.errors."):
            text, _, remedy = tape.error.partition("\n  remedy  ")
            got = "; ".join(map(str.strip, text.partition("\n  got  ")[2].splitlines()))
        elif missing := re.fullmatch(r"ModuleNotFoundError: No module named '([\w.]+)'", said):
            remedy = f"Install {missing[1]} beside gradmesh, in {sys.prefix}."
        said = f"rank {rank} raised {said}" + (f"; got {got}" if got else "")
        return [finding("GM501", said, at, None, [rank], remedy=" ".join(remedy.split()))]
    if run.stuck:
        waiting = [rank for rank, tape in enumerate(tapes) if tape is None]
        last = [(rank, calls[rank][-1]) for rank in waiting if calls[rank]]
        shown = "; ".join(f"rank {rank}: {_said(line)}" for rank, line in last) or "before any collective"
        at = _place(last[0][1]) if last else None
        return [finding("GM402", f"ranks wait, and nothing happens any more: {shown}", at, None, waiting)]
    gone = [rank for rank, tape in enumerate(tapes) if tape is None]
    said = f"rank {gone[0]} ended without an error message: {output[gone[0]][-300:].strip()}"
    return [finding("GM501", said, None, None, gone)]


def _killed(rank: int, number: int, printed: str) -> Finding:
    """A rank that a signal killed, at the innermost line of the program, as Python printed it at the end."""
    names = {each.value: each.name for each in signal.Signals}
    name = names.get(number, f"signal {number}")  # those of real time have none
    why = ", as one does that has taken all the memory" if name == "SIGKILL" else ""
    stack = printed.partition("Fatal Python error")[2]
    lines = [
        Place(file, int(line), "", "")
        for file, line in _FRAME.findall(stack)
        if is_of_the_program(file) and not file.startswith(_PYTHON)
    ]
    at = with_text(lines, 0)
    return finding("GM501", f"rank {rank} was killed by {name}{why}", at, None, [rank])


def _differing(calls: Sequence[Sequence[str]], stopped: set[int]) -> Finding | None:
    """The first call of a group that is not the same on all of its ranks."""
    lists: dict[tuple[str, tuple[int, ...]], dict[int, list[str]]] = {}
    for rank, lines in enumerate(calls):
        for line in lines:
            kind, name, members, *_ = line.split("\t")
            if kind not in ("send", "recv"):
                ranks = tuple(ast.literal_eval(members))
                lists.setdefault((name, ranks), {}).setdefault(rank, []).append(line)
    for (_, group), own in lists.items():
        # A rank that has done all the steps asked for is not seen any more.
        over = [len(own.get(rank, [])) for rank in group if rank in stopped]
        most = min([max(len(lines) for lines in own.values()), *over])
        for at in range(most):
            made = {rank: (own.get(rank, [])[at] if at < len(own.get(rank, [])) else None) for rank in group}
            if len({_key(line) for line in made.values()}) > 1:
                shown = "; ".join(f"rank {rank}: {_said(line)}" for rank, line in made.items())
                there = [line for line in made.values() if line is not None]
                others = [line for line in there if _key(line) != _key(there[0])]
                began = _place(others[0]) if others else None
                text = f"the ranks' calls differ, at call {at + 1} of the group: {shown}"
                return finding("GM401", text, _place(there[0]), began, group)
    return None


def _key(line: str | None) -> tuple[str, ...]:
    if line is None:
        return ("nothing",)
    kind, _, _, shapes, root, _ = line.split("\t")
    return (kind, shapes if kind in _SAME_SHAPES else "", root if kind == "broadcast" else "")


def _said(line: str | None) -> str:
    if line is None:
        return "no call"
    kind, _, _, shapes, _, place = line.split("\t")
    return f"{kind} of {shapes} at {place}"


def _place(line: str) -> Place | None:
    where = line.split("\t")[-1]
    file, _, number = where.rpartition(":")
    return with_text([Place(file, int(number), "", "")], 0) if number.isdigit() else None


_MARGIN = 30.0
"""How much further than a change of its parameters' last bits takes it a gradient may be from the true one."""


def forgive_rounding(context: Context, wrong: Sequence[Got]) -> bool:
    """Take those that are as near to the true gradient as rounding lets them be for unused; whether there are any.

    What a norm takes away, the scale in front of a batch norm for one, leaves a gradient of parts that nearly cancel.
    How far rounding carries is seen where the ranks are run again with the last bits of all parameters changed.
    """
    try:
        shaken = truth_of(run_again(context.segment.parts, shaken=1.0))
    except (UnfaithfulError, RuntimeError):
        return False
    if shaken is None:
        return False
    forgiven = False
    for got in (
        got for got in wrong if got.kind in ("apart", "bent")
    ):  # a multiple of the true one is not a rounding error
        reach = 0.0
        for part in got.parts:
            others = [shaken.gradients[part.rank].get(number) for number in part.ids]
            there = [x for x in others if x is not None]
            if part.true is not None and there and all(x.shape == part.true.shape for x in there):
                moved = torch.stack(there).sum(0) - part.true
                reach = max(reach, float(moved.abs().max()) if moved.numel() else 0.0)
        far = max(float((x - context.expected * got.true).abs().max()) if x.numel() else 0.0 for x in got.got)
        if far <= _MARGIN * reach:
            got.kind = "unused"
            forgiven = True
    return forgiven


def judged(run: Recording, see: Callable[[Context], None] = lambda _: None) -> Verdict:
    """What is wrong with a program that was recorded; `see` is shown each step that is judged."""
    tapes, ranks = run.tapes, len(run.tapes)
    linecache.checkcache()  # a script may have been written anew since another run of this process
    found = endings(run)
    notes: list[str] = []
    followed = list[int]()
    there = [tape for tape in tapes if tape is not None]
    for tape in there:
        label_stepped(tape)
    if len(there) == ranks and not found:
        found += unwaited(there) or steps_apart(there)
    if len(there) == ranks and not found:
        every = segments(there)
        notes += left_over(there, every)
        for number, segment in enumerate(every, 1):
            if not segment.whole:
                continue
            copied = [p.name for steps in segment.steps for step in steps for p in step.params if p.copied]
            if copied:
                notes.append(
                    f"step {number} is written by hand, and another parameter has the value of {copied[0]}, or it is "
                    "kept as it was: it is taken for a trial of a copy, and is not checked"
                )
                continue
            try:
                more = _step(there, segment, number, notes, see, every[number : number + 1], followed)
            except UnpairedError as error:
                notes.append(
                    f"step {number}{_backward(there, segment)} and those after it could not be followed: {error}"
                )
                break
            if segment.manual_calls and not more:
                more = parted(there, segment, every[number : number + 1])
            found += [replace(each, step=number) for each in more]
            if any(each.severity == "error" for each in more):
                break  # what follows is a consequence
        if not found:
            found += reported(there, run.output)
        unseen, of_unseen = parted_unseen(there)
        found += unseen
        notes += of_unseen
        found += [*misannotated(there), *settings_apart(there), *shares_overlap(there), *order_repeats(there)]
        notes += unused_plateaus(there)
        found += idle_apart(there)
        idle = [str(tape.rank) for tape in there if not tape.steps]
        if 0 < len(idle) < len(there) and not found:
            notes.append(
                f"no step was seen on rank {', '.join(idle)}: nothing is said of the others' gradients"
            )
        if not any(tape.steps for tape in there) and not found:
            by_writing, more_notes = parted_by_writing(there)
            found += by_writing
            notes += more_notes
        if not any(tape.steps for tape in there) and not found:
            notes.append("no step of an optimizer was seen: nothing is said of gradients")
    steps = min((tape.steps for tape in there), default=0)
    if steps and len(there) == ranks and not (followed or found or notes):
        notes.append(
            "no step was seen along the gradients of a backward: they are not compared with the true ones"
        )
    failed = run.stuck or len(there) < ranks or any(tape.ended == "raised" for tape in there)
    status: Status = "stopped" if failed else "complete"
    return Verdict(
        _once(found),
        tuple(dict.fromkeys(notes)),
        ranks,
        steps,
        {},
        status,
        min(steps, len(followed)),
        sum(tape.memory for tape in there) + most_memory(),
        _redistributed(there),
    )


def _redistributed(tapes: Sequence[Tape]) -> tuple[Redistribution, ...]:
    """What DTensor redistributed by itself, and how often on the rank that did it most often."""
    most: Counter[tuple[Place | None, str, str, str, int]] = Counter()
    for tape in tapes:
        for (site, operator, before, after, size), times in tape.redistributions.items():
            most |= Counter({(with_text(tape.places, site), operator, before, after, size): times})
    return tuple(Redistribution(*what, times) for what, times in most.items())


def left_over(tapes: Sequence[Tape], every: Sequence[Segment]) -> list[str]:
    """A note on parameters that a program steps by itself behind an optimizer's step, and that are not judged."""
    judged = {id(step) for segment in every for steps in segment.steps for step in steps}
    for tape in tapes:
        steps = [e for e in tape.events if isinstance(e, Step) and e.left_over]
        if steps and not any(id(step) in judged for step in steps):
            names = list(dict.fromkeys(param.name for step in steps for param in step.params))
            return [
                f"{listed(names)} are written at {with_text(tape.places, steps[0].site)} along what is made of "
                "gradients that may have come from other ranks: these gradients are not compared"
            ]
    return []


def _step(
    tapes: Sequence[Tape],
    segment: Segment,
    number: int,
    notes: list[str],
    see: Callable[[Context], None],
    following: Sequence[Segment],
    followed: list[int],
) -> list[Finding]:
    # What the analysis of one program raises becomes a note, and the others' findings stand.
    segment = with_history(tapes, segment)
    with contextlib.ExitStack() as copies:
        try:
            again = run_again(segment.parts)
        except UnpairedError:
            raise
        except Exception as error:
            notes.append(
                f"step {number}{_backward(tapes, segment)} could not be followed: {first_line(error)}"
            )
            return []
        try:
            truth = truth_of(again)
        except Exception as error:
            context = Context(tapes, segment, again, Truth(torch.zeros(()), 0, [], []), [])
            if found := overwritten(context):
                return found
            # A Function may write to what an operator in it keeps for backward: Megatron's cross entropy does.
            copies.enter_context(saved_tensors_hooks(Tensor.clone, lambda x: x))
            try:
                again = run_again(segment.parts)
                truth = truth_of(again)
            except Exception:
                notes.append(
                    f"step {number}{_backward(tapes, segment)} could not be differentiated: {first_line(error)}"
                )
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
            found = _judged_step(context, number, notes, following, followed)
            if not found:
                label_losses(context)
            return found
        except Exception as error:
            notes.append(f"not analysed: step {number} ({type(error).__name__}: {first_line(error)})")
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
    found += [*modes_apart(context), *mixed_shards(context)]
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
        wrong = _without(wrong, [got for got in wrong if got.kind == "bent"])
    for name, names in rounding(context, wrong).items() if wrong else ():
        dropped = [got for got in wrong if got.kind == "bent" and got.name in names]
        if dropped:
            notes.append(
                f"step {number}: {name} sends what it has rounded, which has no gradient but the one that its backward "
                f"chooses: that of {listed([got.name for got in dropped])} is not compared"
            )
            wrong = _without(wrong, dropped)
    hook = next((context.place(tape.rank, tape.comm_hook) for tape in context.tapes if tape.compresses), None)
    if hook is not None and any(got.kind == "bent" or not got.ratio for got in wrong):
        notes.append(
            f"the communication hook registered at {hook} makes something else of gradients than a sum: they are not "
            "compared"
        )
        wrong = _without(wrong, [got for got in wrong if got.kind != "apart"])
    if wrong and segment.manual_calls:
        place = context.place(0, segment.steps[0][0].site)
        notes.append(
            f"step {number} is written by hand at {place}, and not with what is in .grad: its gradients are not checked"
        )
        return found
    if any(got.kind in ("right", "apart", "bent", "unused") for got in context.got):
        followed.append(number)
    alone = scaled_alone(context) or miscounted_norms(context)
    if alone:
        return [*found, *alone]  # what else differs may come of it
    if wrong and not apart:
        named = {each.subject for each in found if each.rule.id == "GM204"}
        wrong = [got for got in wrong if got.name not in named]
        by_calls = faults_of_calls(context, wrong) if wrong else []
        found += by_calls or faults_of_gradients(context, wrong)
    elif not apart:
        found += added_before_sums(context, []) or used_apart(context) or faults_of_gradients(context, [])
        found += (
            ([] if sends_nothing(context.tapes) else drifted(context.got, context))
            or drifted_later(context, following)
            or overwritten_steps(context, following)
        )
        found += repeated_terms(context) or means_of_means(context)
        notes.extend(notes_on_averages(context) + notes_on_scaled(context))
    changed: dict[str, list[str]] = {}
    first = first_not_finite(context) if any(got.kind == "infinite" for got in context.got) else None
    where = f": {first[2]} at {context.place(*first[:2])}, on rank {first[0]}" if first else ""
    for got in context.got:
        if got.kind == "infinite":
            notes.append(
                f"step {number}: the gradient of {got.name} is not finite, and is not compared{where}"
            )
        if got.kind == "unknown":
            notes.append(
                f"{got.name} is stepped, and it is not seen where it is used: its gradient is not compared"
            )
        if got.kind == "changed":
            what = next(part.param.changed for part in got.parts if part.param.changed is not None)
            rank = next(part.rank for part in got.parts if part.param.changed is not None)
            place = context.place(rank, what.site)
            changed.setdefault(what.what + (f" at {place}" if place is not None else ""), []).append(got.name)
        if got.kind == "ambiguous":
            notes.append(
                f"{got.name} begins as one number everywhere: it is unknown whether the ranks share it"
            )
    for said, names in changed.items():
        notes.append(
            f"the gradient of {listed(names)} is changed before the step ({said}): "
            "whether that is intended is unknown, so it is not compared"
        )
    return found


def _without(wrong: Sequence[Got], unclear: Sequence[Got]) -> list[Got]:
    """Those that are compared; of the others it is known from now on that they are not."""
    for got in unclear:
        got.kind = "unclear"
    return [got for got in wrong if got.kind != "unclear"]


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
