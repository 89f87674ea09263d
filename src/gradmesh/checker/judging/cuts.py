"""Gradients that a program stops in front of a collective: on purpose or not, which nobody can tell."""

from __future__ import annotations

from collections.abc import Sequence

from gradmesh.checker.judging.context import Context
from gradmesh.checker.recording.tape import Alias, Event, Op, Root, Sent, refs

__all__ = ["cut_before_collectives"]


def cut_before_collectives(context: Context) -> list[str]:
    """A note for each collective that is handed what was detached, and that a loss depends on."""
    found = {}
    for rank in range(len(context.tapes)):
        events = context.events(rank)
        cut: set[int] = set()
        for at, event in enumerate(events):
            if isinstance(event, Op):
                if _detaches(context, rank, event) or (
                    cut.intersection(refs(event)) and not _follows(context, rank, event.outs)
                ):
                    cut.update(event.outs)
            elif isinstance(event, Alias) and event.of in cut:
                cut.add(event.id)
            elif (
                isinstance(event, Sent)
                and event.phase == "forward"
                and cut.intersection(event.ins)
                and not _follows(context, rank, event.outs)
                and _reaches_a_loss(events[at:], event.outs)
            ):
                found[event.site] = (
                    f"what {event.kind} is handed at {context.place(rank, event.site)} was detached, and the loss "
                    "depends on its result: whether that is meant cannot be told"
                )
    return list(dict.fromkeys(found.values()))


def _detaches(context: Context, rank: int, event: Op) -> bool:
    if event.name != "aten.detach.default" or event.call is not None:
        return False
    x = context.tensor(rank, refs(event)[0])
    return x is not None and x.requires_grad


def _follows(context: Context, rank: int, numbers: Sequence[int]) -> bool:
    tensors = (context.tensor(rank, number) for number in numbers)
    return any(x is not None and x.requires_grad for x in tensors)


def _reaches_a_loss(events: Sequence[Event], numbers: Sequence[int]) -> bool:
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
