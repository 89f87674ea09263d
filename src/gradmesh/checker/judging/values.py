"""Values that should be the same on ranks and are not, or the other way round: parameters, buffers, masks, data."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from gradmesh.checker.findings import Finding, Place
from gradmesh.checker.judging.context import Context, finding, listed, with_text
from gradmesh.checker.judging.parameters import Got, Segment, copies_of, grouped, is_sum, near
from gradmesh.checker.trace import (
    MOVES,
    Annotation,
    Op,
    Param,
    ProgramInput,
    Root,
    Sent,
    Step,
    Tape,
    is_constant,
    label_stepped,
    makes,
    refs,
)
from gradmesh.verify.laws import as_real


def never_same(context: Context) -> list[Finding]:
    """GM202: Parameters whose gradients are the same on ranks, and whose values are not."""
    by_name: dict[str, list[tuple[int, Param, Step]]] = {}
    for rank, steps in enumerate(context.segment.steps):
        for step in steps:
            for param in step.params:
                if not param.whole and param.grad is not None:
                    by_name.setdefault(param.name, []).append((rank, param, step))
    wrong = []
    for name, parts in by_name.items():
        values = [param.value for _, param, _ in parts]
        grads = [param.grad for _, param, _ in parts if param.grad is not None]
        if len(parts) < 2 or len({x.shape for x in values}) > 1 or len({x.shape for x in grads}) > 1:
            continue
        same = all(torch.equal(x, grads[0]) for x in grads) and bool(grads[0].any())
        if (
            same
            and not all(_is_its_own(context, rank, param) for rank, param, _ in parts)
            and not all(near(x, values[0], 1e-5) for x in values)
        ):
            wrong.append((name, parts))
    if not wrong:
        return []
    name, parts = wrong[0]
    others = f" and {len(wrong) - 1} other parameters" if len(wrong) > 1 else ""
    held = [(rank, param.value) for rank, param, _ in parts]
    said = (
        f"{name}{others} get the same gradient on every rank, and have had other values on the ranks from the start: "
        + held_on(name, held)
    )
    rank, first, step = parts[0]
    used = context.place(rank, context.used_at(rank, [first.id] if first.id is not None else []))
    stepped, remedy = context.place(rank, step.site), ""
    if (summed := _summed_at(context, rank, tuple(first.value.shape))) is not None:
        copies = [ranks for ranks in copies_of([value for _, value in held]) if len(ranks) > 1]
        groups = " and ".join(f"ranks {_numbers([held[at][0] for at in ranks])}" for ranks in copies)
        own = (
            f"take the group of the ranks that hold copies there, {groups}: dist.all_reduce(p.grad, group=group)"
            if copies
            else "leave its gradient out there"
        )
        remedy = (
            "If each rank has a parameter of its own, such as that of a pipeline stage or an expert, its gradient must "
            f"not be joined with the others' at {Path(summed.file).name}:{summed.line}: {own}. If these are meant as "
            "copies of one parameter, broadcast it from one rank after the model is built."
        )
    return [finding("GM202", said, summed or used, stepped, [r for r, *_ in parts], name, remedy)]


def _summed_at(context: Context, rank: int, shape: tuple[int, ...]) -> Place | None:
    """The one line where gradients of a shape are summed over the ranks after backward; None if there is none."""
    events = context.events(rank)
    sites = {e.site for e in events if isinstance(e, Sent) and is_sum(e) and e.shapes[:1] == [shape]}
    return context.place(rank, sites.pop()) if len(sites) == 1 else None


def held_on(name: str, held: Sequence[tuple[int, Tensor]]) -> str:
    """Which ranks hold which values, shown at the entry that differs most."""
    first = held[0][1].detach().flatten()
    far = max(held, key=lambda each: float((each[1].detach().flatten() - first).abs().max()))[1]
    at = int((far.detach().flatten() - first).abs().argmax())
    by_value: dict[str, list[int]] = {}
    for rank, value in held:
        by_value.setdefault(f"{value.flatten()[at].item():.6g}", []).append(rank)
    shown = [f"{value} on rank{'s' * (len(r) > 1)} {_numbers(r)}" for value, r in list(by_value.items())[:4]]
    return f"{name}.flatten()[{at}] is {', '.join(shown)}"


def _is_its_own(context: Context, rank: int, param: Param) -> bool:
    """Whether a rank's gradient is that of its own parameter alone, as where all use theirs in the same way."""
    true = context.truth.gradients[rank].get(param.id) if param.id is not None else None
    return true is not None and param.grad is not None and near(true, param.grad, 1e-4)


def statistics(context: Context) -> list[Finding]:
    """GM203: Buffers that differ between ranks that have the same parameters."""
    replicated = {got.ranks for got in context.got if len(got.parts) > 1}
    each = [steps[0] for steps in context.segment.steps]
    buffers = set.intersection(*(set(step.buffers) for step in each))
    # Ranks without a collective between them have one model: what the loss takes of it is the same.
    frozen = set.intersection(*(set(step.frozen) & context.taken(rank) for rank, step in enumerate(each)))
    for name in sorted(buffers) + ([] if context.again.calls else sorted(frozen)):
        values = [step.buffers[name] if name in buffers else step.frozen[name] for step in each]
        for ranks in replicated:
            own = [values[rank] for rank in ranks]
            if len({x.shape for x in own}) == 1 and not all(near(x, own[0], 1e-5) for x in own):
                said = f"the buffer {name} is made of each rank's own data, and differs between ranks of one model"
                if name in frozen:
                    said = f"{name} takes no gradient, and differs between ranks of one model, whose loss depends on it"
                said += f": {held_on(name, list(zip(ranks, own, strict=True)))}"
                at, by_hand = _written_at(context, ranks[0], name)
                if name in buffers and at < 0:
                    continue  # nothing writes it: it may be a rank's shard of a constant
                remedy = _OF_FROZEN if name in frozen else _BY_HAND if by_hand else ""
                return [finding("GM203", said, context.place(ranks[0], at), None, ranks, name, remedy)]
    return []


_BY_HAND = (
    "Make it of the data of all ranks where it is updated: dist.all_reduce its sums and counts before they are "
    "written. If only evaluation reads it, averaging or broadcasting it before evaluation and before saving is enough."
)


_OF_FROZEN = (
    "Make it the same on all ranks: load it from one file or seed, or broadcast it, dist.broadcast(p.data, src=0) for "
    "p in its parameters()."
)


def _written_at(context: Context, rank: int, name: str) -> tuple[int, bool]:
    """The line that writes a buffer, or that of a batch norm; and whether the program writes it."""
    at = context.segment.steps[rank][0].written.get(name, -1)
    norms = (e.site for e in context.events(rank) if isinstance(e, Op) and "batch_norm" in e.name)
    norm = next(norms, -1) if at < 0 else -1
    return max(at, norm), norm < 0


def tied(context: Context) -> list[Finding]:
    """GM204: Parameters of one value under two names on different ranks, whose gradients are not the same.

    Layers that are made from one seed begin with one value too. Evidence that copies are meant as one parameter is
    that one is a table and the other is not, which are not made alike, or that their value was sent from one to the
    other.
    """
    seen: list[tuple[int, Param]] = []
    found = []
    sent = _sent_as_another(context)
    for rank, steps in enumerate(context.segment.steps):
        for param in (param for step in steps for param in step.params):
            value = param.value
            if param.whole or value.numel() < 8 or is_constant(value):
                continue
            for other_rank, other in seen:
                if other_rank == rank or other.name == param.name or other.value.shape != value.shape:
                    continue
                if not torch.equal(other.value, value) or _same(other.grad, param.grad):
                    continue
                uses = {_is_looked_up(context, other_rank, other), _is_looked_up(context, rank, param)}
                if len(uses) == 2 or {(other_rank, other.name), (rank, param.name)} in sent:
                    said = (
                        f"{other.name} on rank {other_rank} and {param.name} on rank {rank} begin with one value, "
                        "and get different gradients: they are no longer tied after the step"
                    )
                    at = context.place(other_rank, context.used_at(other_rank, [other.id or -1]))
                    began = context.place(rank, context.used_at(rank, [param.id or -1]))
                    found.append(finding("GM204", said, at, began, (other_rank, rank), param.name))
            seen.append((rank, param))
    return found[:1]


def _sent_as_another(context: Context) -> list[set[tuple[int, str]]]:
    """Pairs of a rank and a parameter that one broadcast or sum has made one, under different names.

    Not where this is so of all parameters of a rank: then whole stages are made to begin alike.
    """
    pairs = [
        {(rank, name), (other_rank, other)}
        for calls in context.again.groups
        for rank, call in calls.items()
        for other_rank, other_call in calls.items()
        if rank < other_rank
        for name, other in zip(call.parameters, other_call.parameters, strict=False)
        if name != other
    ]
    reached = set().union(*pairs)
    whole = {
        rank
        for rank, steps in enumerate(context.segment.steps)
        if all((rank, param.name) in reached for step in steps for param in step.params)
    }
    return [pair for pair in pairs if not whole.issuperset(rank for rank, _ in pair)]


def _is_looked_up(context: Context, rank: int, param: Param) -> bool:
    """Whether a parameter is used as a table, whose rows are looked up."""
    return any(
        isinstance(event, Op) and "embedding" in event.name and param.id in refs(event)
        for event in context.events(rank)
    )


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return near(a, b, 1e-3)


def same_data(context: Context) -> list[Finding]:
    """GM301: Ranks that all do the same, and average what they get."""
    group = max(context.truth.classes, key=len)
    averaged = [steps[0].wrapped for steps in context.segment.steps]
    averaged += [
        tuple(calls)
        for calls in context.again.groups
        if any(c.kind in ("all_reduce", "reduce_scatter") and c.phase != "forward" for c in calls.values())
    ]
    if context.again.calls or not any(len(set(group).intersection(ranks)) > 1 for ranks in averaged):
        return []
    roots = {e.id for e in context.events(0) if isinstance(e, Root)}
    site = next((e.site for e in context.events(0) if isinstance(e, Op) and roots.intersection(e.outs)), -1)
    who = f"all {len(group)} ranks" if len(group) == len(context.tapes) else f"ranks {_numbers(group)}"
    said = f"{who} compute the same loss from the same data: their average is what each has alone"
    return [finding("GM301", said, context.place(0, site), context.place(0, context.root_site(0)), group)]


class _Masked(NamedTuple):
    """A product with a random mask."""

    event: Op
    operand: Tensor
    mask: ProgramInput


def masks(context: Context) -> list[Finding]:
    """GM302, GM303: Random masks that differ where the activation is the same, or the other way round."""
    drawn: list[dict[tuple[str, str, int], _Masked]] = []
    data: list[list[Tensor]] = []
    for rank in range(len(context.tapes)):
        inputs = {e.id: e for e in context.events(rank) if isinstance(e, ProgramInput)}
        masks = {number: e for number, e in inputs.items() if e.random}
        leaves = {e.id for e in context.events(rank) if isinstance(e, ProgramInput) and e.leaf}
        own: dict[tuple[str, str, int], _Masked] = {}
        for event in context.events(rank):
            if not isinstance(event, Op) or event.base not in ("mul", "mul_", "masked_fill", "where"):
                continue
            taken = refs(event)
            mask = next((masks[n] for n in taken if n in masks), None)
            others = [n for n in taken if n not in masks and n not in leaves]
            operand = context.tensor(rank, others[0]) if others else None
            # A mask has nothing in it but zero and one other number.
            if mask is None or operand is None or mask.value.numel() < 4 or mask.value.is_complex():
                continue
            if len(mask.value.unique()) > 2:
                continue
            place = str(context.place(rank, event.site))
            nth = sum(1 for key in own if key[:2] == (event.name, place))
            own[event.name, place, nth] = _Masked(event, operand.detach(), mask)
        drawn.append(own)
        used = {each.mask.id for each in own.values()}
        data.append([e.value for e in inputs.values() if not e.leaf and e.id not in used])
    found: dict[tuple[str, str], Finding] = {}
    for key in set.intersection(*[set(each) for each in drawn]):
        every = [each[key] for each in drawn]
        copies = copies_of([each.operand for each in every])
        for ranks in copies:
            there = [every[rank] for rank in ranks]
            apart = not all(torch.equal(each.mask.value, there[0].mask.value) for each in there)
            # Ranks may make masks of their own from one draw, and mask parameters for data of their own.
            apart = apart and len({each.mask.random for each in there}) > 1
            if apart and (
                all(is_same_data(data[rank], data[ranks[0]]) for rank in ranks)
                or all(_is_of_a_call(context, rank, every[rank].event) for rank in ranks)
            ):
                event = there[0].event
                said = f"the activation is the same on ranks {_numbers(ranks)}, and each draws another mask for it"
                at = context.place(ranks[0], event.site)
                found.setdefault(("GM302", key[1]), finding("GM302", said, at, None, ranks))
        everything = [each.mask.value for each in every]
        same = len({x.shape for x in everything}) == 1 and all(
            torch.equal(x, everything[0]) for x in everything
        )
        # Masks of different draws may be the same by chance, as where nothing is masked.
        same = same and len({each.mask.random for each in every}) == 1
        if len(copies) == len(drawn) and same and context.again.calls:
            event = every[0].event
            said = "every rank draws the same mask, for another part of the activation"
            at = context.place(0, event.site)
            found.setdefault(("GM303", key[1]), finding("GM303", said, at, None, range(len(drawn))))
    return list(found.values())


def _is_of_a_call(context: Context, rank: int, at: Op) -> bool:
    """Whether an operand of an operator is made of what a collective returned."""
    events = context.events(rank)
    wanted = set(refs(at))
    for event in reversed(events[: next(n for n, each in enumerate(events) if each is at)]):
        if wanted.intersection(makes(event)):
            if isinstance(event, Sent):
                return True
            wanted.update(refs(event))
    return False


def _numbers(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def drifted(before: Sequence[Got], context: Context) -> list[Finding]:
    """GM201: Parameters that were one before the step, got the same gradient, and are not one after it."""
    found = []
    for got in before:
        if got.kind not in ("right", "unused", "bent") or len(got.parts) < 2:
            continue
        after = [part.param.after for part in got.parts]
        values = [x for x in after if x is not None]
        if got.parts[0].param.whole or len(values) != len(after):
            continue
        if not all(near(x, values[0], 1e-5) for x in values):
            rank = got.parts[0].rank
            site = context.segment.steps[rank][0].site
            said = (
                f"{got.name} is the same on ranks {_numbers(got.ranks)} before the step and gets the same gradient, "
                f"and is not the same after it: {held_on(got.name, list(zip(got.ranks, values, strict=True)))}"
            )
            found.append(finding("GM201", said, context.place(rank, site), None, got.ranks, got.name))
    return found[:1]


def copies_part(tapes: Sequence[Tape | None]) -> list[Finding]:
    """GM201: Parameters equal on ranks, with equal gradients, that any later step makes different."""
    there = [tape for tape in tapes if tape is not None]
    for tape in there:
        label_stepped(tape)
    for steps in zip(*map(_steps, there), strict=False) if len(there) == len(tapes) else ():
        for group in _copies(steps):
            after = [
                (rank, param.after) for rank, param in group if param.after is not None and not param.whole
            ]
            if len(after) == len(group) and not all(near(x, after[0][1], 1e-5) for _, x in after):
                rank, name = group[0][0], group[0][1].name
                said = (
                    f"{name} is the same on ranks {_numbers([r for r, _ in group])} before a step and gets the same "
                    f"gradient, and is not the same after it: {held_on(name, after)}"
                )
                remedy = "Load the optimizer's state on every rank that steps a copy of the parameter, or broadcast it."
                place = with_text(there[rank].places, steps[rank].site)
                return [finding("GM201", said, place, None, [r for r, _ in group], name, remedy)]
    return []


def parted_unseen(tapes: Sequence[Tape]) -> tuple[list[Finding], list[str]]:
    """GM101, GM201: Parameters equal on all ranks until an optimizer steps along gradients that no backward made.

    Ranks that brought together as many numbers as the parameter has before the step work on one model, and so do ranks
    that step along derivatives by torch.func, which are compared as those of a backward. Of others a note is made.
    """
    rows = list(zip(*(_steps_with_sums(tape) for tape in tapes), strict=False))
    if not rows or any(isinstance(event, Root) for tape in tapes for event in tape.events):
        return [], []
    first = rows[0][0][0]
    made = with_text(tapes[0].places, first.transformed)
    why = f"come from torch.func, at {made}," if made else "are not those of a backward"
    notes = [
        f"the gradients at {with_text(tapes[0].places, first.site)} {why} and are not compared with the true ones"
    ]
    every = range(len(tapes))
    for row in rows:
        held = [{p.name: p for p in step.params if not p.whole and step.optimizer >= 0} for step, _ in row]
        for name in held[0] if all(own.keys() == held[0].keys() for own in held) else ():
            params = [own[name] for own in held]
            values, after = [p.value for p in params], [p.after for p in params]
            there, grads = [x for x in after if x is not None], [p.grad for p in params if p.grad is not None]
            one = all(_same_numbers(x, values[0]) for x in values) and not is_constant(values[0])
            if not one or not len(there) == len(grads) == len(every):
                continue
            if all(near(x, there[0], 1e-5) for x in there) or all(near(x, grads[0], 1e-5) for x in grads):
                continue
            said = f"{name} is the same on all ranks before the step, and the ranks step along different gradients"
            joined = all(sent >= values[0].numel() for _, sent in row)
            if joined:
                said += ", though they have brought gradients together before"
            said += f": it is not the same after it: {held_on(name, list(enumerate(there)))}"
            step = row[0][0]
            place = with_text(tapes[0].places, step.site)
            began = with_text(tapes[0].places, step.transformed)
            if joined:
                return [finding("GM201", said, place, began, every, name)], notes
            if began is not None:
                return [finding("GM101", said, place, began, every, name)], notes
            return [], [*notes, f"{said}, at {place}: it is unknown whether each rank has a model of its own"]
    return [], notes


def _steps_with_sums(tape: Tape) -> list[tuple[Step, int]]:
    """A rank's steps, each with how many numbers the ranks brought together at once, at most, since the one before."""
    found, largest = list[tuple[Step, int]](), 0
    for event in tape.events:
        if isinstance(event, Step):
            found.append((event, largest))
            largest = 0
        elif isinstance(event, Sent) and len(event.group) > 1 and event.kind not in _ONE_WAY:
            largest = max(largest, _entries(event))
    return found


_ONE_WAY = ("broadcast", "scatter", "send", "recv", "barrier")


def drifted_later(context: Context, following: Sequence[Segment]) -> list[Finding]:
    """GM201: Copies that not every rank steps itself, equal before a step and different after it."""
    for later in following:
        after = [
            {
                event.name: event.value
                for event in part
                if isinstance(event, ProgramInput) and event.leaf and event.name
            }
            for part in later.parts
        ]
        for got in context.got:
            some = any(not part.steps or part.covered is not None for part in got.parts)
            if len(got.parts) < 2 or got.parts[0].param.whole or not some:
                continue
            values = [after[part.rank].get(got.name) for part in got.parts]
            there = [x for x in values if x is not None]
            if len(there) == len(values) and not all(near(x, there[0], 1e-5) for x in there):
                rank = next((part.rank for part in got.parts if part.steps), got.parts[0].rank)
                said = (
                    f"{got.name} is the same on ranks {_numbers(got.ranks)} before the step, each rank's optimizer "
                    "steps a part of the model, and it is not the same when it is used next: "
                    + held_on(got.name, list(zip(got.ranks, there, strict=True)))
                )
                site = context.segment.steps[rank][0].site
                remedy = "After the step send every parameter from the rank that stepped it to all ranks that use it."
                return [finding("GM201", said, context.place(rank, site), None, got.ranks, got.name, remedy)]
    return []


def parted(tapes: Sequence[Tape], segment: Segment, following: Sequence[Segment]) -> list[Finding]:
    """GM201: Parameters that were one before a step that the program writes itself, and are not one before the next."""
    for later in following:
        before, after = ([_values(steps) for steps in each.steps] for each in (segment, later))
        for name, first in before[0].items():
            then = [own.get(name) for own in before]
            now = [own.get(name) for own in after]
            # A number that was drawn, where all of the model is one on the ranks, is like what surrounds it.
            drawn = first.numel() == 1 and float(first) not in _BEGINNINGS and _is_one(before)
            one = all(x is not None and near(x, first, 1e-6) for x in then)
            one = one and (drawn or not is_constant(first))
            there = [x for x in now if x is not None and x.shape == first.shape]
            if one and len(there) == len(now) and not all(near(x, there[0], 1e-5) for x in there):
                said = (
                    f"{name} is the same on all ranks before the step, and is not the same after it: "
                    + held_on(name, list(enumerate(there)))
                )
                place = with_text(tapes[0].places, segment.steps[0][0].site)
                return [finding("GM201", said, place, None, range(len(tapes)), name)]
    return []


def parted_by_writing(tapes: Sequence[Tape]) -> tuple[list[Finding], list[str]]:
    """GM201: Parameters that were one until a program without any backward wrote to them, and are never one again.

    Ranks may displace them for a while, as evolution strategies do, or each have a chain of samples. It is an error
    where what they become is made of what other ranks sent, and no message is as large as the parameter, by which
    ranks would tell each other where they are.
    """
    largest = max((_entries(e) for tape in tapes for e in tape.events if isinstance(e, Sent)), default=0)
    for number in dict.fromkeys(each.number for each in tapes[0].written):
        own = [[each for each in tape.written if each.number == number] for tape in tapes]
        rows = list(zip(*own, strict=False))
        one = [all(near(each.value, row[0].value, 1e-5) for each in row) for row in rows]
        last = max(
            (at for at, row in enumerate(rows) if one[at] and not is_constant(row[0].value)), default=-1
        )
        if last < 0 or len({row[0].calls for row in rows[last + 1 :]}) < 3:
            continue
        name = rows[-1][0].name or f"parameter {number}"
        said = (
            f"{name} is the same on all ranks at first, and is not the same again after the program writes to it: "
            + held_on(name, [(rank, each.value) for rank, each in enumerate(rows[-1])])
        )
        place = with_text(tapes[0].places, rows[-1][0].site)
        if largest < rows[-1][0].value.numel() and any(each.of_received for row in rows for each in row):
            return [finding("GM201", said, place, None, range(len(tapes)), name)], []
        return [], [f"{said}, at {place}: it is unknown whether each rank has a model of its own"]
    return [], []


def _values(steps: Sequence[Step]) -> dict[str, Tensor]:
    return {param.name: param.value for step in steps for param in step.params if not param.whole}


_BEGINNINGS = (0.0, 1.0, -1.0)
"""Numbers that parameters of a rank begin with as those of all ranks do."""


def _is_one(held: Sequence[dict[str, Tensor]]) -> bool:
    """Whether ranks have the same parameters, with the same values."""
    return all(
        own.keys() == held[0].keys() and all(_same(own[name], held[0][name]) for name in own) for own in held
    )


def _same_numbers(a: Tensor, b: Tensor) -> bool:
    """Not where they are sparse, which torch does not compare, or have no memory."""
    plain = a.shape == b.shape and a.layout is b.layout is torch.strided
    return plain and not a.is_meta and torch.equal(a, b)


def is_same_data(own: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    """Whether two ranks have the same tensors."""
    return own is other or (len(own) == len(other) and all(map(_same_numbers, own, other)))


def overwritten_steps(context: Context, following: Sequence[Segment]) -> list[Finding]:
    """GM201: Parameters that one rank steps, and that a broadcast from another one sets back on all."""
    for later in following:
        used = [
            {e.name: e.value for e in part if isinstance(e, ProgramInput) and e.leaf and e.name}
            for part in later.parts
        ]
        for got in context.got:
            stepped = [
                part
                for part in got.parts
                if part.steps
                and part.param.after is not None
                and not torch.equal(part.param.after, part.param.value)
            ]
            if got.kind == "unused" or got.parts[0].param.whole or not 0 < len(stepped) < len(got.parts):
                continue
            then = [used[part.rank].get(got.name) for part in got.parts]
            if not all(x is not None and torch.equal(x, got.parts[0].param.value) for x in then):
                continue
            owners = [part.rank for part in stepped]
            rank, shape = owners[0], tuple(got.parts[0].param.value.shape)
            for event in later.parts[rank]:
                if not isinstance(event, Sent) or event.kind != "broadcast" or event.shapes[:1] != [shape]:
                    continue
                if event.group[event.root] in owners:
                    continue
                said = (
                    f"{got.name} is stepped on rank {_numbers(owners)} alone, and has its old value on all ranks when "
                    f"it is used next: it is broadcast from rank {event.group[event.root]}, which has not stepped it"
                )
                remedy = f"Broadcast each parameter from the rank whose optimizer steps it: here src={rank}."
                began = context.place(rank, context.segment.steps[rank][0].site)
                at = context.place(rank, event.site)
                return [finding("GM201", said, at, began, got.ranks, got.name, remedy)]
    return []


def steps_apart(tapes: Sequence[Tape]) -> list[Finding]:
    """GM201: A step that some ranks of one model take and others do not."""
    names = [[p.name for e in tape.events if isinstance(e, Step) for p in e.params] for tape in tapes]
    if len({tuple(sorted(set(each))) for each in names}) > 1:
        return []  # other programs
    kinds = [
        [e for e in tape.events if isinstance(e, Root) or (isinstance(e, Step) and not e.left_over)]
        for tape in tapes
    ]
    for at in range(min(map(len, kinds))):
        these = [each[at] for each in kinds]
        steps = [rank for rank, event in enumerate(these) if isinstance(event, Step)]
        if 0 < len(steps) < len(tapes):
            rank = steps[0]
            if not _steps_between_calls(tapes):
                return []  # more backwards than the others' for one step
            place = with_text(tapes[rank].places, these[rank].site)
            said = f"ranks {_numbers(steps)} take a step that the others do not take: their parameters part"
            return [finding("GM201", said, place, None, range(len(tapes)))]
    return []


def _steps_between_calls(tapes: Sequence[Tape]) -> bool:
    """Whether a rank takes fewer steps than another one between two calls that both make."""
    counted: dict[str, list[list[int]]] = {}
    for tape in tapes:
        own: dict[str, list[int]] = {}
        for event in tape.events:
            if isinstance(event, Step):
                for counts in own.values():
                    counts[-1] += 1
            elif isinstance(event, Sent) and len(event.group) > 1 and event.kind not in ("send", "recv"):
                own.setdefault(event.name, []).append(0)
        for name, counts in own.items():
            counted.setdefault(name, []).append(counts)
    return any(
        # More steps may follow the last call that was seen.
        any(at + 1 < len(counts) and counts[at] < max(each) for counts in every if at < len(counts))
        for every in counted.values()
        for at, each in enumerate(zip(*every, strict=False))
    )


def idle_apart(tapes: Sequence[Tape]) -> list[Finding]:
    """GM201: Parameters that some ranks step and others, which run backward too, never do, and that then differ."""
    stepping = [tape for tape in tapes if tape.steps]
    for tape in tapes if stepping else ():
        roots = [event for event in tape.events if isinstance(event, Root)]
        other, steps = stepping[0], _steps(stepping[0])
        each = sum(isinstance(event, Root) for event in other.events) // len(steps)
        if tape.steps or len(steps) < 2 or each == 0 or len(roots) <= each:
            continue
        before = {param.name: param.value for param in steps[0].params}
        then = {param.name: param.value for param in steps[1].params}
        for name, value in roots[each].held.items():
            first = roots[0].held.get(name)
            if name not in then or first is None or then[name].shape != value.shape:
                continue
            if torch.equal(first, before[name]) and not near(value, then[name], 1e-5):
                pair = [(other.rank, then[name]), (tape.rank, value)]
                said = (
                    f"{name} is the same on ranks {other.rank} and {tape.rank}, rank {other.rank} steps it and rank "
                    f"{tape.rank} does not, and it is not the same when it is used next: {held_on(name, pair)}"
                )
                remedy = (
                    "Step on every rank along the same gradient; or send every parameter from the rank that stepped it "
                    "to the others after its step."
                )
                place = with_text(other.places, steps[0].site)
                return [finding("GM201", said, place, None, (other.rank, tape.rank), name, remedy)]
    return []


def sends_nothing(tapes: Sequence[Tape | None], *, at_last: bool = False) -> bool:
    """Whether each rank trains for itself, as far as was seen: no more than numbers and first values are sent.

    With `at_last`, what is between the last two steps of an optimizer alone counts.
    """
    for tape in (tape for tape in tapes if tape is not None):
        steps = [(at, event) for at, event in enumerate(tape.events) if isinstance(event, Step)]
        same = [at for at, event in steps if event.optimizer == steps[-1][1].optimizer]
        events = tape.events[same[-2] : same[-1]] if at_last and len(same) > 1 else tape.events
        sent = [event for event in events if isinstance(event, Sent) and len(event.group) > 1]
        if not all(event.kind in ("broadcast", "barrier") or _entries(event) <= 1 for event in sent):
            return False
    return True


def averages_values(tapes: Sequence[Tape | None]) -> Place | None:
    """The line where ranks bring what is as large as a parameter together after some steps; None without one."""
    for tape in tapes:
        if tape is None:
            continue
        sizes = {
            param.value.numel() for event in tape.events if isinstance(event, Step) for param in event.params
        }
        least, stepped = max(2, min(sizes, default=2)), False
        for event in tape.events:
            stepped = stepped or isinstance(event, Step)
            brings = isinstance(event, Sent) and event.kind.startswith(("all_reduce", "reduce", "all_gather"))
            if stepped and isinstance(event, Sent) and brings and _entries(event) >= least:
                return with_text(tape.places, event.site)
    return None


def buffers_together(tapes: Sequence[Tape | None], names: Sequence[str]) -> Place | None:
    """The line where ranks average buffers after a step, or send them; None without one for each of them."""
    places: dict[str, Place | None] = {}
    for tape in (tape for tape in tapes if tape is not None):
        label_stepped(tape)
        first = next(
            (at for at, event in enumerate(tape.events) if isinstance(event, Step)), len(tape.events)
        )
        for event in (event for event in tape.events[first:] if isinstance(event, Sent)):
            places |= dict.fromkeys(event.buffers, with_text(tape.places, event.site))
    return places[names[0]] if places.keys() >= set(names) else None


def _entries(event: Sent) -> int:
    """How many numbers a rank hands in."""
    return sum(math.prod(shape) for shape in event.shapes)


_REMEDY = (
    "Make the copy after the parameters are the same on all ranks, target = copy.deepcopy(model.module) behind "
    "DistributedDataParallel(model); or broadcast it: dist.broadcast(p, src=0) for p in target.parameters()."
)


def targets_apart(context: Context, following: Sequence[Segment]) -> list[Finding]:
    """What is moved towards a parameter that ranks share, by the same part of the way, and differs between them."""
    taken = [context.taken(rank) for rank in range(len(context.tapes))]
    for later in following:
        for got in context.got:
            if len(got.parts) < 2 or got.parts[0].param.whole:
                continue
            steps = [(context.segment.steps[rank][0], later.steps[rank][0]) for rank in got.ranks]
            for name in set.intersection(*(taken[rank] for rank in got.ranks)):
                values = [_held(now, name) for now, _ in steps]
                shares = [
                    _kept(value, _held(then, name), part.param.after)
                    for value, (_, then), part in zip(values, steps, got.parts, strict=True)
                ]
                known = [share for share in shares if share is not None]
                if len(known) < len(shares) or max(known) - min(known) > 1e-2 * (1 - min(known)):
                    continue
                after = [x for _, then in steps if (x := _held(then, name)) is not None]
                there = [x for x in values if x is not None]
                if not any(all(near(x, held[0], 1e-5) for x in held) for held in (there, after)):
                    return [_found(context, got, name, there, 1 - known[0], later)]
    return []


def _found(
    context: Context, got: Got, name: str, values: Sequence[Tensor], share: float, later: Segment
) -> Finding:
    rank = got.ranks[0]
    said = (
        f"{name} moves by {share:.4g} of the way to {got.name} at each step, and {got.name} is the same on all ranks, "
        f"but {name} is not: {held_on(name, list(zip(got.ranks, values, strict=True)))}"
    )
    written = later.steps[rank][0].written.get(name, -1)
    at = context.place(rank, written if written >= 0 else context.segment.steps[rank][0].site)
    return finding("GM202", said, at, None, got.ranks, name, _REMEDY)


def _held(step: Step, name: str) -> Tensor | None:
    return step.frozen.get(name, step.buffers.get(name))


def _kept(before: Tensor | None, then: Tensor | None, to: Tensor | None) -> float | None:
    """How much is left of the way to another tensor after one step to it; None where that is not how it moves."""
    if before is None or then is None or to is None or not before.shape == then.shape == to.shape:
        return None
    way, left = (before - to).double().flatten(), (then - to).double().flatten()
    square = float(way @ way)
    if way.numel() < 4 or square == 0:
        return None
    kept = float(left @ way) / square
    moved = (1 - kept) * float(way.abs().max())
    rounding = 4e-7 * float(to.abs().max())
    exact = float((left - kept * way).abs().max()) <= 1e-2 * moved and moved > 10 * rounding
    return kept if exact and kept >= -1e-3 else None


_SAME = 1e-6
"""Two settings are the same if they differ by no more than this part of them, as where float32 holds one."""


def settings_apart(tapes: Sequence[Tape]) -> list[Finding]:
    """The first step that ranks take with different settings; else a scheduler that they give different values.

    Only copies of one parameter are compared: what is the same on ranks before the step and gets the same gradient.
    Ranks whose parameters are their own, as shards and experts are, may have settings of their own. So may ranks that
    send nothing, which train models of their own.
    """
    if sends_nothing(tapes):
        return []
    for steps in zip(*map(_steps, tapes), strict=False):
        for group in _copies(steps):
            if (found := _apart(tapes, group, steps)) is not None:
                return [found]
    return _given_apart(tapes)


_OF_TYPES = {"value": ("R", "I"), "gradient": ("I", "P")}
"""The types of which every rank has the same value, and the same gradient."""


def misannotated(tapes: Sequence[Tape]) -> list[Finding]:
    """GM305: The first tensor whose value is not what `spmd_types.assert_type` says, or the last such gradient."""
    if len(tapes) < tapes[0].size:
        return []  # a rank has ended, and nothing is known of its values
    rows: list[dict[Place | None, list[Annotation]]] = [{} for _ in tapes]
    for tape, row in zip(tapes, rows, strict=True):
        for each in tape.annotations:
            row.setdefault(with_text(tape.places, each.site), []).append(each)
    # Where ranks come to a line another number of times, it is unknown which times belong together.
    paired = [(at, zip(*(row.get(at, ()) for row in rows), strict=False)) for at in rows[0]]
    paired = [(at, pairs) for at, pairs in paired if len({len(row.get(at, ())) for row in rows}) == 1]
    for same in itertools.zip_longest(*(pairs for _, pairs in paired)):
        by_line = [(at, row) for (at, _), row in zip(paired, same, strict=True) if row is not None]
        values, gradients = (
            [f for at, row in by_line for f in _contradicted(row, what, at)] for what in _OF_TYPES
        )
        if values or gradients:
            return values[:1] or gradients[-1:]  # the others may be a consequence
    return []


def _contradicted(row: Sequence[Annotation], what: str, place: Place | None) -> Iterator[Finding]:
    for rank, first in enumerate(row):
        for ranks, kind in first.types.items():
            held = [(each, getattr(row[each], what)) for each in ranks]
            if kind not in _OF_TYPES[what] or rank != min(ranks) or any(x is None for _, x in held):
                continue
            same_shape = len({x.shape for _, x in held}) == 1
            far = 1e-5 if held[0][1].dtype.itemsize > 2 else 0.02
            if same_shape and all(near(x.nan_to_num(), held[0][1].nan_to_num(), far) for _, x in held):
                continue
            shown = (
                held_on("it", held) if same_shape else f"the shapes are {[tuple(x.shape) for _, x in held]}"
            )
            said = f"a tensor is annotated {kind} over ranks {_numbers(ranks)}, and its {what} is not the same there: "
            yield finding("GM305", said + shown, place, None, list(ranks))


def unused_plateaus(tapes: Sequence[Tape]) -> list[str]:
    """A note for each `ReduceLROnPlateau` that was not stepped while the program was recorded."""
    if sends_nothing(tapes) or len(tapes) < 2:
        return []
    return [
        f"the ReduceLROnPlateau made at {with_text(tapes[0].places, plateau.made)} was not stepped within the "
        f"{tapes[0].steps} optimizer steps that were checked: whether every rank gives it the same value was not "
        "checked; --steps N checks more steps"
        for plateau in tapes[0].plateaus
        if not plateau.given and any(True for _ in _groups_of(tapes, plateau.optimizer))
    ]


def _steps(tape: Tape) -> list[Step]:
    return [event for event in tape.events if isinstance(event, Step) and not event.left_over]


def _copies(steps: Sequence[Step]) -> Iterator[list[tuple[int, Param]]]:
    """Parameters that are the same on some ranks, before a step, as their gradients are; each with its rank."""
    by_name: dict[str, list[tuple[int, Param]]] = {}
    for rank, step in enumerate(steps):
        for param in step.params:
            if param.grad is not None and param.settings is not None:
                by_name.setdefault(param.name, []).append((rank, param))
    for parts in by_name.values():
        groups = grouped(parts, lambda a, b: _is_copy(a[1], b[1]))
        yield from (group for group in groups if len({rank for rank, _ in group}) > 1)


def _is_copy(a: Param, b: Param) -> bool:
    if a.whole:
        return (a.whole, a.mesh) == (b.whole, b.mesh)
    if a.grad is None or b.grad is None or a.value.shape != b.value.shape or a.grad.shape != b.grad.shape:
        return False
    same = torch.equal(a.value, b.value) and bool(a.grad.any())
    return same and near(a.grad, b.grad, 1e-6)


def _apart(
    tapes: Sequence[Tape], group: Sequence[tuple[int, Param]], steps: Sequence[Step]
) -> Finding | None:
    every = [(rank, param.settings) for rank, param in group if param.settings is not None]
    keys = [key for key in every[0][1].numbers if all(key in each.numbers for _, each in every)]
    odd = [key for key in keys if not _same_settings([each.numbers[key] for _, each in every])]
    if not odd:
        return None
    shown = "; ".join(
        f"{key} is {_listed([(rank, each.numbers[key]) for rank, each in every])}" for key in odd
    )
    name = group[0][1].name
    one = "is the same on these ranks before the step and gets the same gradient"
    one = "is one parameter, of which these ranks hold shards" if group[0][1].whole else one
    said = f"{name} {one}, but the optimizers' settings differ: {shown}"
    rank, own = every[0]
    rates = all("lr" in key for key in odd)
    began = own.scheduled if rates and own.scheduled >= 0 else own.made
    places = tapes[rank].places
    at = with_text(places, steps[rank].site)
    return finding("GM206", said, at, with_text(places, began), [r for r, _ in every], name)


def _given_apart(tapes: Sequence[Tape]) -> list[Finding]:
    """GM206: A `ReduceLROnPlateau` that ranks give different values, whose optimizer steps copies of parameters."""
    for plateaus in zip(*(tape.plateaus for tape in tapes), strict=False):
        for given in zip(*(plateau.given for plateau in plateaus), strict=False):
            for group in _groups_of(tapes, plateaus[0].optimizer):
                values = [(rank, (given[rank][0],)) for rank in group]
                if _same_settings([value for _, value in values]):
                    continue
                said = (
                    f"ReduceLROnPlateau.step() is given another value on each rank: {_listed(values)}. The learning "
                    "rates differ as soon as one rank's value stops to improve before the other's, and these ranks "
                    "step copies of the same parameters"
                )
                rank = group[0]
                at = with_text(tapes[rank].places, given[rank][1])
                began = with_text(tapes[rank].places, plateaus[rank].made)
                return [finding("GM206", said, at, began, group, "ReduceLROnPlateau")]
    return []


def _groups_of(tapes: Sequence[Tape], optimizer: int) -> Iterator[list[int]]:
    """The ranks whose optimizer of a number steps copies of a parameter."""
    for steps in zip(*map(_steps, tapes), strict=False):
        if all(step.optimizer == optimizer for step in steps):
            for group in _copies(steps):
                yield sorted({rank for rank, _ in group})
            return


def _same_settings(values: Sequence[tuple[float, ...]]) -> bool:
    first = values[0]
    return all(
        len(each) == len(first)
        and all(
            math.isclose(a, b, rel_tol=_SAME) or a != a or b != b for a, b in zip(each, first, strict=True)
        )
        for each in values
    )


def _listed(values: Sequence[tuple[int, tuple[float, ...]]]) -> str:
    """Values with their ranks.

    >>> _listed([(0, (0.1,)), (1, (0.9, 0.99))])
    '0.1 on rank 0, (0.9, 0.99) on rank 1'
    """
    shown = [
        f"{value[0]:.6g}" if len(value) == 1 else f"({', '.join(f'{x:.6g}' for x in value)})"
        for _, value in values
    ]
    listed = ", ".join(f"{text} on rank {rank}" for text, (rank, _) in zip(shown[:4], values, strict=False))
    return listed + (f" and others on {len(values) - 4} more ranks" if len(values) > 4 else "")


def modes_apart(context: Context) -> list[Finding]:
    """GM208: Layers that are in training on some ranks of one model and in evaluation on others."""
    for ranks in {got.ranks for got in context.got if len(got.parts) > 1}:
        steps = {rank: context.segment.steps[rank][0] for rank in ranks}
        for name in sorted(set.intersection(*(set(step.modes) for step in steps.values()))):
            training = [rank for rank in ranks if steps[rank].modes[name]]
            if 0 < len(training) < len(ranks):
                others = [rank for rank in ranks if rank not in training]
                said = (
                    f"the layer {name} is in training on rank {_numbers(training)} and in evaluation on rank "
                    f"{_numbers(others)}, and these ranks bring the gradients of one model together"
                )
                place = context.place(others[0], context.root_site(others[0]))
                return [finding("GM208", said, place, None, ranks, name)]
    return []


def mixed_shards(context: Context) -> list[Finding]:
    """GM207: Shards whose entries a step mixes, without a collective."""
    for got in context.got:
        for part in got.parts:
            steps = [step for step in context.segment.steps[part.rank] if step.mixed]
            cut = part.param.whole and any(kind == "shard" for kind, _ in part.param.placements)
            named = [step.mixed[got.name] for step in steps if got.name in step.mixed]
            pieces = (
                [found for step in steps for found in step.mixed.values()] if part.covered is not None else []
            )
            split = not part.param.whole and bool(named) and _is_split(context, got.name)
            for what, site in (named if cut or split else []) or pieces:
                said = (
                    f"the step takes {what} of what rank {part.rank} holds of {got.name}, and moves its entries by "
                    "the result; other ranks hold other entries of it, and no collective runs in the step"
                )
                began = context.place(part.rank, context.used_at(part.rank, part.ids))
                return [finding("GM207", said, context.place(part.rank, site), began, got.ranks, got.name)]
    return []


def _is_split(context: Context, name: str) -> bool:
    """Whether ranks have parts of one matrix: what each makes with its part is summed over them, of other operands.

    Or it is gathered from them, and made of the same operand.
    """
    found = []
    for rank, steps in enumerate(context.segment.steps):
        param = next((param for step in steps for param in step.params if param.name == name), None)
        product = None if param is None or param.id is None else _product(context, rank, param.id)
        if param is not None and product is not None:
            found.append((param.value, *product))
    values, operands = [x for x, *_ in found], [y for _, y, _ in found]
    kinds = [kind for *_, kind in found]
    if len(found) < 2 or len({*kinds}) > 1 or all(near(x, values[0], 1e-6) for x in values):
        return False
    return (kinds[0] == "all_gather") == all(near(x, operands[0], 1e-6) for x in operands)


def _product(context: Context, rank: int, number: int) -> tuple[Tensor, str] | None:
    """What a parameter is multiplied with, and the collective that takes the product."""
    made, after, operand = {number}, set[int](), None
    for event in context.events(rank):
        taken = refs(event)
        if isinstance(event, Op):
            name = event.base
            if operand is None and name in _PRODUCTS and made.intersection(taken):
                others = [x for n in taken if n not in made and (x := context.tensor(rank, n)) is not None]
                operand, after = (others[-1].detach() if others else None), set(event.outs)
            elif name in MOVES and made.intersection(taken):
                made.update(event.outs)
            if after.intersection(taken) and (name in MOVES or name.startswith("add")):
                after.update(event.outs)
        elif isinstance(event, Sent) and event.followed and after.intersection(taken) and operand is not None:
            return operand, "all_gather" if event.kind.startswith("all_gather") else event.kind
    return None


_PRODUCTS = {"mm", "addmm", "bmm", "matmul", "linear", "convolution"}


def unwaited(tapes: Sequence[Tape]) -> list[Finding]:
    """GM403: Results of asynchronous calls that are used before these are waited for."""
    for tape in tapes:
        for each in tape.unwaited:
            what = f"the gradient of {each.subject} is stepped with" if each.subject else "the result is used"
            said = f"{each.kind} is called with async_op=True, and {what} before the call is waited for"
            at, began = with_text(tape.places, each.used), with_text(tape.places, each.started)
            return [finding("GM403", said, at, began, range(len(tapes)), each.subject)]
    return []


def shares_overlap(tapes: Sequence[Tape]) -> list[Finding]:
    """GM304: Samplers whose ranks read some samples several times in one epoch, and others never."""
    for epochs in zip(*(tape.epochs for tape in tapes), strict=False):
        first, own = epochs[0], {each.rank: each for each in epochs}
        alike = len({(each.sampler, each.size, each.replicas) for each in epochs}) == 1
        if not alike or len(own) < 2:
            continue
        read = [set(each.indices) for each in own.values()]
        twice = sum(map(len, read)) - len(set().union(*read))
        if twice <= max(0, max(each.padding for each in epochs)):
            continue
        seeds = [(rank, tuple(map(float, each.seed))) for rank, each in enumerate(epochs)]
        why = f"seed and epoch of the samplers are {_listed(seeds)}"
        if len({each.seed for each in epochs}) == 1:
            why = "the subsets of the data set that the samplers have differ"
        said = (
            f"the ranks' shares of a data set of {first.size} samples overlap: {twice} samples are read by several "
            f"ranks in one epoch; {why}"
        )
        return [finding("GM304", said, with_text(tapes[0].places, first.site), None, range(len(tapes)))]
    return []


def order_repeats(tapes: Sequence[Tape]) -> list[Finding]:
    """GM304: Samplers that shuffle alike in two epochs."""
    for tape in tapes:
        last: dict[int, list[int]] = {}
        for each in tape.epochs:
            if each.shuffle and len(each.indices) > 2 and last.get(each.sampler) == each.indices:
                said = (
                    f"the DistributedSampler gives rank {tape.rank} the same {len(each.indices)} samples in the same "
                    "order in two epochs, though it shuffles"
                )
                return [finding("GM304", said, with_text(tape.places, each.site), None, range(len(tapes)))]
            last[each.sampler] = each.indices
    return []


def brought_together(tapes: Sequence[Tape | None]) -> tuple[bool, bool, list[Finding]]:
    """GM209: Whether ranks bring parameters nearer after their own steps, make them equal, and do so wrongly."""
    some, equal, there = False, False, [tape for tape in tapes if tape is not None]
    rows = list(zip(*map(_steps, there), strict=False))
    every = ((now, rows[at:]) for at, now in enumerate(rows, 1))
    pairs = ((now, [row for row in others if row[0].optimizer == now[0].optimizer]) for now, others in every)
    for now, then in ((now, others[0]) for now, others in pairs if others):
        after = [
            {p.name: p.after for p in step.params if p.after is not None and not p.whole} for step in now
        ]
        later = [{p.name: p.value for p in step.params} for step in then]
        names = [name for name in after[0] if all(name in each for each in (*after, *later))]
        names = [name for name in names if len({each[name].shape for each in (*after, *later)}) == 1]
        apart = [name for name in names if not all(near(each[name], after[0][name], 1e-5) for each in after)]
        one = [name for name in apart if all(near(each[name], later[0][name], 1e-6) for each in later)]
        equal = equal or bool(one)
        totals = {name: torch.stack([each[name] for each in after]).sum(0) for name in one}
        some = some or any(
            _spread([x[name] for x in later]) < 0.99 * _spread([x[name] for x in after]) for name in apart
        )
        place, ranks = with_text(there[0].places, now[0].site), range(len(there))
        for name, total in totals.items():
            if near(later[0][name], total, 1e-5) and bool(total.any()):
                said = (
                    f"after steps of their own the ranks go on with the sum of what they have of {name}, which is not "
                    f"divided by {len(there)}: {held_on(name, list(enumerate(each[name] for each in after)))}"
                )
                return True, True, [finding("GM209", said, place, None, ranks, name)]
        if some and one and (left := [name for name in apart if name not in one]):
            said = (
                f"after steps of their own the ranks average {listed(one)}, and not {listed(left)}, which differ "
                "between the ranks"
            )
            return True, True, [finding("GM209", said, place, None, ranks, left[0])]
    return some, equal, []


def _spread(values: Sequence[Tensor]) -> float:
    """How far ranks' values are from their mean."""
    every = torch.stack([as_real(x.detach()) for x in values])
    return float((every - every.mean(0)).norm())
