"""A step that is being judged: what all kinds of findings look at."""

from __future__ import annotations

import linecache
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from gradmesh.checker.findings import Finding, Place
from gradmesh.checker.judging.parameters import Got
from gradmesh.checker.judging.segments import Segment
from gradmesh.checker.judging.truth import Truth
from gradmesh.checker.recording.tape import Alias, Event, Op, Root, Sent, Tape, refs
from gradmesh.checker.replay.engine import Again
from gradmesh.checker.rules import RULES

__all__ = ["Context", "finding", "with_text"]


@dataclass
class Context:
    """A step that is being judged.

    Attributes:
        tapes: of the ranks.
        segment: what leads to the step.
        again: the same, run again.
        truth: its true gradients.
        got: what each parameter got.
        expected: the ratio of a right gradient to the true one: 1, or one over the number of losses.
    """

    tapes: Sequence[Tape]
    segment: Segment
    again: Again
    truth: Truth
    got: list[Got]
    expected: float = 1.0

    def factors(self) -> tuple[float, ...]:
        """What all gradients may be, in units of the true ones: 1, or 1/n for a mean over n losses.

        These are the ranks' losses, those of a group of ranks, or those of several backwards before a step.
        """
        different = self.truth.different
        sizes = {
            len(call.group) for calls in self.again.groups for call in calls.values() if not call.followed
        }
        over_ranks = {1, *(n for n in {different, *sizes} if n and different % n == 0)}
        each = {sum(isinstance(event, Root) for event in part) for part in self.segment.parts}
        backwards = {1, *(each if len(each) == 1 else ())} - {0}
        return tuple(1 / n for n in sorted({a * b for a in over_ranks for b in backwards}))

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
                if isinstance(event, (Op, Sent)):
                    made.update(event.outs)
                elif isinstance(event, Alias):
                    made.add(event.id)

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
