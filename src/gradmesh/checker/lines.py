"""The types of what each line of a program makes, as they are seen when all ranks are run again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from gradmesh.checker.findings import Place
from gradmesh.checker.judging.context import Context
from gradmesh.checker.judging.parameters import near
from gradmesh.checker.trace import Alias, Op, Sent, refs
from gradmesh.types import I, P, R, Type, V

_MOVING = {"view", "_unsafe_view", "clone", "detach", "alias", "transpose", "t", "permute", "cat", "expand"}


@dataclass(frozen=True)
class Line:
    """What a line of the program makes."""

    place: Place  # which line
    type: Type  # of what it makes, over all ranks
    sends: str  # the collective that it calls; "" for none
    takes: tuple[int, ...]  # the lines, by their order, that made what it takes


def lines_of(context: Context) -> list[Line]:
    """The lines of a step that the loss depends on, in the order in which they are first run.

    A value that is the same on all ranks is I where every rank's share of its gradient is the same, so that they repeat
    one work, and else R. One that differs is P where it goes into a sum over the ranks, and else V.
    """
    ranks = range(len(context.tapes))
    made: list[dict[str, int]] = []
    for rank in ranks:
        last: dict[str, int] = {}
        for event in context.events(rank):
            if isinstance(event, (Op, Sent)) and event.outs and event.site >= 0:
                x = context.tensor(rank, event.outs[0])
                if x is not None and x.requires_grad:
                    last[str(context.place(rank, event.site))] = event.outs[0]
        made.append(last)
    summed = _summed(context)
    summed_in_place = {
        number
        for event in context.events(0)
        if isinstance(event, Sent) and event.kind == "all_reduce" and event.reduce == "sum"
        for number in set(event.ins) & set(event.outs)
    }
    order: dict[str, int] = {}
    found: list[Line] = []
    owner: dict[int, int] = {}
    for event in context.events(0):
        if not isinstance(event, (Op, Sent)) or event.site < 0:
            continue
        place = context.place(0, event.site)
        key = str(place)
        takes = {owner[number] for number in refs(event) if number in owner}
        if key in order:
            at = order[key]
            before = found[at]
            sends = before.sends or (event.kind if isinstance(event, Sent) else "")
            found[at] = Line(before.place, before.type, sends, tuple(sorted({*before.takes, *takes} - {at})))
        elif place is not None and all(key in each for each in made):
            numbers = [each[key] for each in made]
            values = [x for rank in ranks if (x := context.tensor(rank, numbers[rank])) is not None]
            # What is summed in place is here as it is after that.
            before_sum = isinstance(event, Op) and numbers[0] in summed_in_place
            kind = P if before_sum else _type(context, values, numbers[0] in summed)
            order[key] = at = len(found)
            sends = event.kind if isinstance(event, Sent) else ""
            found.append(Line(place, kind, sends, tuple(sorted(takes))))
        else:
            continue
        owner.update(dict.fromkeys(event.outs, at))
    return found


def _type(context: Context, values: Sequence[Tensor], summed: bool) -> Type:
    if not all(near(x.detach(), values[0].detach(), 1e-6) for x in values):
        return P if summed else V
    gradients = context.truth.at(values)
    known = [g for g in gradients if g is not None]
    if len(known) == len(gradients) and all(near(g, known[0], 1e-4) for g in known):
        return I
    return R


def _summed(context: Context) -> set[int]:
    """The tensors of rank 0 that go into a sum over the ranks."""
    found: set[int] = set()
    for event in reversed(context.events(0)):
        if isinstance(event, Sent) and event.kind in ("all_reduce", "reduce_scatter", "reduce"):
            found.update(event.ins)
        elif isinstance(event, Op) and event.base in _MOVING and found.intersection(event.outs):
            found.update(refs(event))
        elif isinstance(event, Alias) and event.id in found:
            found.add(event.of)
    return found
