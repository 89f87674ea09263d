"""A step that is being judged: what all kinds of findings look at."""

from __future__ import annotations

import linecache
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from gradmesh.checker.findings import RULES, Finding, Place
from gradmesh.checker.judging.parameters import Got, Segment, Truth
from gradmesh.checker.replay import Again, scale_of
from gradmesh.checker.trace import Alias, Event, Op, Over, ProgramInput, Ref, Root, Sent, Tape, makes, refs


@dataclass
class Context:
    """A step that is being judged."""

    tapes: Sequence[Tape]  # of the ranks
    segment: Segment  # what leads to the step
    again: Again  # the same, run again
    truth: Truth  # its true gradients
    got: list[Got]  # what each parameter got
    # the ratio of a right gradient to the true one: 1, or one over the number of losses
    expected: float = 1.0

    def factors(self) -> tuple[float, ...]:
        """What all gradients may be, in units of the true ones: 1, or 1/n for a mean over n losses.

        These are the ranks' losses, those of a group of ranks, those of groups that have one loss in parts, or those of
        several backwards before a step. What the program multiplies by the number of ranks, a loss or the gradient of a
        Function, may be meant without that factor.
        """
        different = self.truth.different
        sizes = {(len(call.group), call.followed) for calls in self.again.groups for call in calls.values()}
        over_ranks = {1, different} - {0}
        for n, followed in sizes:
            if different and different % n == 0:
                over_ranks |= {different // n, 1 if followed else n}
        each = {sum(isinstance(event, Root) for event in part) for part in self.segment.parts}
        backwards = {1, *(each if len(each) == 1 else ())} - {0}
        if all(self._multiplied_by_ranks(rank) for rank in range(len(self.tapes))):
            over_ranks.add(len(self.tapes))
        taken_back = set.union(*map(self._scales_of_losses, range(len(self.tapes))))
        if len(taken_back) == 1 and (scale := taken_back.pop()) in range(2, len(self.tapes) + 1):
            over_ranks |= {a * int(scale) for a in over_ranks}
        return tuple(1 / n for n in sorted({a * b for a in over_ranks for b in backwards}))

    def _multiplied_by_ranks(self, rank: int) -> bool:
        """Whether the last operator of each loss of a rank multiplies it by the number of ranks."""
        events = self.events(rank)
        made = {out: e for e in events if isinstance(e, Op) for out in e.outs}
        lasts = [made.get(e.id) for e in events if isinstance(e, Root)]
        return bool(lasts) and all(
            op is not None and op.name == "aten.mul.Tensor" and op.args[1] == len(self.tapes) for op in lasts
        )

    def _scales_of_losses(self, rank: int) -> set[float]:
        """By what Functions multiply the gradients of the terms of a rank's losses, as if to take back a mean."""
        found, scales = set[float](), dict[int, set[float]]()
        for event in self.events(rank):
            if isinstance(event, Alias):
                scales[event.id] = scales.get(event.of, {1.0})
            elif isinstance(event, Op) and event.call is None:
                passes = event.base in ("add", "mul", "div", "_to_copy")
                terms = [scales[n] for n in refs(event) if n in scales] if passes else []
                scales |= dict.fromkeys(event.outs, set[float]().union(*terms) or {1.0})
            elif isinstance(event, Over):
                back, ins = event.call.back, event.call.ins
                own = scale_of(back) if back is not None and len(back.met) == 1 and back.gave else None
                before = {1.0} if own is None or ins[0] is None else scales.get(ins[0], {1.0})
                after = {round((own or 1.0) * each, 6) for each in before}
                scales |= {out: after for out in event.call.outs if out is not None}
            elif isinstance(event, Root):
                found |= scales.get(event.id, {1.0})
        return found

    def place(self, rank: int, site: int) -> Place | None:
        """A line, with its text."""
        return with_text(self.tapes[rank].places, site)

    def events(self, rank: int) -> list[Event]:
        """What a rank did."""
        return self.segment.parts[rank]

    def tensor(self, rank: int, number: int) -> Tensor | None:
        """A tensor of a rank, run again."""
        return self.again.ranks[rank].tensors.get(number)

    def used_at(self, rank: int, numbers: Sequence[int]) -> int:
        """The line where one of some tensors is first used; -1 where none is."""
        wanted = set(numbers)
        for event in self.events(rank):
            if isinstance(event, Op) and "detach" not in event.name and wanted.intersection(refs(event)):
                return event.site
        return -1

    def reached(self, rank: int, numbers: Sequence[int]) -> Iterator[Event]:
        """The events that what is made of some tensors goes through, in order."""
        made = set(numbers)
        for event in self.events(rank):
            if made.intersection(refs(event)):
                yield event
                made.update(makes(event))

    def taken(self, rank: int) -> set[str]:
        """The names of the frozen parameters and buffers that a loss of a rank depends on."""
        taken = self.segment.steps[rank][0].taken
        return {name for name, numbers in taken.items() if numbers and _reaches(self.events(rank), numbers)}

    def root_site(self, rank: int) -> int:
        """The line of a rank's backward."""
        return next((event.site for event in self.events(rank) if isinstance(event, Root)), -1)


def with_text(places: Sequence[Place], site: int) -> Place | None:
    """A line by its number, with its text."""
    if not 0 <= site < len(places):
        return None
    there = places[site]
    return replace(there, text=linecache.getline(there.file, there.line).strip())


def finding(
    rule: str,
    said: str,
    at: Place | None,
    began: Place | None,
    ranks: Sequence[int],
    subject: str = "",
    remedy: str = "",
) -> Finding:
    """A finding of a rule; the same line twice is said once, and the rule's remedy where there is no other."""
    began = None if began == at else began
    return Finding(RULES[rule], said, at, began, tuple(sorted(set(ranks))), subject, remedy)


def listed(names: Sequence[str]) -> str:
    """Some names, in words."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def cut_before_collectives(context: Context) -> list[str]:
    """A note for each collective, and each hand-written Function, that is handed what was detached.

    Only those are named that a loss depends on. A Function may have its collective in backward, which never runs.
    """
    found: dict[int, str] = {}
    for rank, tape in enumerate(context.tapes):
        events, begin = context.events(rank), context.segment.begins[rank]
        cut = _cut(context, rank)
        handed = [
            (at, event.kind, event.site, event.ins, event.outs)
            for at, event in enumerate(events)
            if isinstance(event, Sent)
            and event.phase == "forward"
            # An extremum that a verb takes of what it has detached itself, with a rule of its own, has no gradient.
            and not (event.verb is not None and event.reduce == "max")
            and (event.call is None or tape.calls[event.call].ours)
        ]
        for call in tape.calls.values():
            if not call.ours and begin <= call.begin < begin + len(events):
                ins, outs = ([n for n in numbers if n is not None] for numbers in (call.ins, call.outs))
                handed.append((call.begin - begin, call.name, call.site, ins, outs))
        for at, name, site, ins, outs in handed:
            if cut.intersection(ins) and not _follows(context, rank, outs) and _reaches(events[at:], outs):
                found[site] = (
                    f"what {name} is handed at {context.place(rank, site)} was detached, and the loss depends on its "
                    "result: it is unknown whether that is intended"
                )
    return list(dict.fromkeys(found.values()))


def _cut(context: Context, rank: int) -> set[int]:
    """What a rank has detached, and what it made of nothing else."""
    cut: set[int] = set()
    for event in context.events(rank):
        if isinstance(event, Op):
            if _detaches(context, rank, event) or (
                cut.intersection(refs(event)) and not _follows(context, rank, event.outs)
            ):
                cut.update(event.outs)
        elif isinstance(event, Alias) and event.of in cut:
            cut.add(event.id)
    return cut


def _detaches(context: Context, rank: int, event: Op) -> bool:
    if event.name != "aten.detach.default" or event.call is not None:
        return False
    x = context.tensor(rank, refs(event)[0])
    return x is not None and x.requires_grad


def _follows(context: Context, rank: int, numbers: Sequence[int]) -> bool:
    tensors = (context.tensor(rank, number) for number in numbers)
    return any(x is not None and x.requires_grad for x in tensors)


def _reaches(events: Sequence[Event], numbers: Sequence[int]) -> bool:
    """Whether a backward begins at what is made of some tensors."""
    made, views = set(numbers), dict[int, int]()
    for event in events:
        if isinstance(event, Root) and event.id in made:
            return True
        if isinstance(event, Alias):
            views[event.id] = event.of
        if isinstance(event, Over) and made.intersection(event.call.ins):
            made.update(number for number in event.call.outs if number is not None)
        if made.intersection(refs(event)):
            made.update(makes(event), (views[number] for number in makes(event) if number in views))
    return False


def with_history(tapes: Sequence[Tape], segment: Segment) -> Segment:
    """A step with what made the tensors that its losses depend on and that were made before the step before it."""
    parts, begins = [], []
    for tape, part, begin in zip(tapes, segment.parts, segment.begins, strict=True):
        older = {
            event.id: event.of
            for event in part
            if isinstance(event, ProgramInput) and event.of >= 0 and _reaches(part, [event.id])
        }
        made = _makes(tape.events[:begin], older.values()) if older else []
        parts.append(made + [
            Op("aten.alias.default", (Ref(older[event.id]),), {}, [event.id], event.site, None)
            if isinstance(event, ProgramInput) and event.id in older
            else event
            for event in part
        ])  # fmt: skip
        begins.append(begin - len(made))
    return replace(segment, parts=parts, begins=begins)


def _makes(events: Sequence[Event], numbers: Iterable[int]) -> list[Event]:
    """Those of some events that make some tensors."""
    wanted, found = set(numbers), list[Event]()
    for event in reversed(events):
        outs, ins = makes(event), refs(event)
        if isinstance(event, Over):
            ins, outs = ([n for n in each if n is not None] for each in (event.call.ins, event.call.outs))
        if wanted.intersection(outs):
            found.append(event)
            wanted.update(ins)
    return found[::-1]
