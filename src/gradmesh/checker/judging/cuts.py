"""Gradients that a program stops in front of a collective: on purpose or not, which is unknown."""

from __future__ import annotations

from collections.abc import Sequence

from gradmesh.checker.judging.context import Context
from gradmesh.checker.recording.tape import Alias, Event, Op, Root, Sent, refs

__all__ = ["cut_before_collectives"]


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
            and not _has_no_gradient(event)
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


def _has_no_gradient(event: Sent) -> bool:
    """Whether it is an extremum that a verb takes of what it has detached itself, with a rule of its own."""
    return event.verb is not None and event.reduce == "max"


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
    made = set(numbers)
    for event in events:
        if isinstance(event, Root) and event.id in made:
            return True
        if made.intersection(refs(event)):
            if isinstance(event, (Op, Sent)):
                made.update(event.outs)
            elif isinstance(event, Alias):
                made.add(event.id)
    return False
