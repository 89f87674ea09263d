"""Tapes cut at their optimizer steps: what leads to each step, on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gradmesh.checker.recording.tape import Event, ProgramInput, Root, Scaled, Step, Tape

__all__ = ["Segment", "segments"]


@dataclass
class Segment:
    """What leads to a step, on all ranks.

    Attributes:
        parts: each rank's events before its step.
        steps: each rank's steps; several where one backward serves several optimizers.
        begins: how many events of each rank's tape are before it.
    """

    parts: list[list[Event]]
    steps: list[list[Step]]
    begins: list[int]

    @property
    def whole(self) -> bool:
        """Whether there is a backward."""
        return any(isinstance(event, Root) for part in self.parts for event in part)

    @property
    def manual_calls(self) -> bool:
        """Whether the program writes a step itself, along something else than what is in `.grad`."""
        return not all(step.by_gradients for steps in self.steps for step in steps)


def segments(tapes: Sequence[Tape]) -> list[Segment]:
    """All of it that ends in a step on every rank."""
    cut = [[(begin, part, _real(steps)) for begin, part, steps in _cut(tape)] for tape in tapes]
    found = []
    for at in range(min(len(each) for each in cut)):
        each = [rank[at] for rank in cut]
        found.append(Segment([p for _, p, _ in each], [s for _, _, s in each], [b for b, _, _ in each]))
    return found


def _real(steps: Sequence[Step]) -> list[Step]:
    """Steps, without what a program writes to parameters that an optimizer steps too: it takes a displacement back."""
    stepped = {param.name for step in steps if not step.manual for param in step.params}
    return [
        step
        for step in steps
        if step.by_gradients or not stepped.issuperset(param.name for param in step.params)
    ]


def _cut(tape: Tape) -> list[tuple[int, list[Event], list[Step]]]:
    found: list[tuple[int, list[Event], list[Step]]] = []
    begin, part, steps = 0, list[Event](), list[Step]()
    for at, event in enumerate(tape.events):
        if isinstance(event, Step):
            steps.append(event)
            continue
        if steps and not isinstance(event, Scaled):
            found.append((begin, part, steps))
            begin, part, steps = at, [], []
        part.append(event)
    if steps:
        found.append((begin, part, steps))
    # A step without a backward before it belongs to the one before.
    merged: list[tuple[int, list[Event], list[Step]]] = []
    for each in found:
        if merged and not any(isinstance(event, Root) for event in each[1]) and not _grows(each[1]):
            merged[-1][2].extend(each[2])
        else:
            merged.append(each)
    return merged


def _grows(part: Sequence[Event]) -> bool:
    return any(isinstance(event, ProgramInput) and event.leaf for event in part)
