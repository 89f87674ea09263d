"""The types of what each line of a program makes, as they are seen when all ranks are run again, and their picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
from torch import Tensor

from gradmesh.checker.findings import Finding, Place
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


_COLOURS = {"V": "#56B4E9", "R": "#F0E442", "I": "#009E73", "P": "#E69F00"}
_READS = {
    "V": "V varying: each rank has its own",
    "R": "R replicated: the same, used differently",
    "I": "I invariant: the same, the same work",
    "P": "P partial: a sum still to be taken",
}


def drawn(lines: Sequence[Line], findings: Sequence[Finding], title: str) -> Figure:
    """Lines coloured by the types of what they make, with what goes between them; those of findings have a red edge."""
    marked = {
        str(place) for finding in findings for place in (finding.at, finding.began) if place is not None
    }
    shown = list(lines)[:60]
    height = 0.42 * len(shown) + 1.6
    figure = Figure(figsize=(11, height), dpi=130)
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set(xlim=(0, 11), ylim=(height, 0))
    axes.axis("off")
    axes.text(0.2, 0.35, title, fontsize=11, weight="bold", va="center")
    for at, (letter, reads) in enumerate(_READS.items()):
        left = 0.2 + at * 2.7
        axes.add_patch(
            FancyBboxPatch((left, 0.68), 0.18, 0.18, boxstyle="round,pad=0.02", color=_COLOURS[letter])
        )
        axes.text(left + 0.3, 0.78, reads, fontsize=7.5, va="center")
    for at, line in enumerate(shown):
        top, place = 1.15 + 0.42 * at, line.place
        edge = "#C00000" if str(place) in marked else _COLOURS[line.type.value]
        box = FancyBboxPatch(
            (2.4, top),
            8.3,
            0.28,
            boxstyle="round,pad=0.03",
            facecolor=_COLOURS[line.type.value] + "66",
            edgecolor=edge,
            linewidth=2.2 if str(place) in marked else 0.8,
        )
        axes.add_patch(box)
        text = place.text if len(place.text) < 92 else place.text[:89] + "..."
        axes.text(2.5, top + 0.15, text, fontsize=7.5, family="monospace", va="center")
        axes.text(10.6, top + 0.15, line.type.value, fontsize=9, weight="bold", va="center", ha="right")
        name = f"{Path(place.file).name}:{place.line}"
        axes.text(2.3, top + 0.15, name, fontsize=6.5, va="center", ha="right", color="#555555")
        for source in line.takes:
            if source >= len(shown) or source == at:
                continue
            bend = min(0.9, 0.18 + 0.05 * abs(at - source))
            axes.add_patch(
                FancyArrowPatch(
                    (2.38, 1.29 + 0.42 * source), (2.38, top + 0.14), arrowstyle="-|>", mutation_scale=7,
                    connectionstyle=f"arc3,rad={bend if source < at else -bend}", color="#999999", linewidth=0.7,
                )
            )  # fmt: skip
        if line.sends:
            axes.text(10.2, top + 0.15, line.sends, fontsize=7, va="center", ha="right", style="italic")
    if len(lines) > len(shown):
        axes.text(2.4, height - 0.15, f"and {len(lines) - len(shown)} more lines", fontsize=7.5, va="center")
    return figure
