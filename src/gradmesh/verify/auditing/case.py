"""The function under audit as the checks see it: its ranks, what it is, and what is already known of it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from gradmesh.verify.auditing.pool import LostError, Pool
from gradmesh.verify.auditing.probes import Answer, Point, Probe, first_order
from gradmesh.verify.auditing.readings import Pattern, Reading
from gradmesh.verify.auditing.report import Finding
from gradmesh.verify.auditing.subject import Trouble

__all__ = ["Case", "RefusedError", "patterns_of", "show_troubles", "troubles", "worst_trouble"]


class RefusedError(Exception):
    """The function raised where it was asked; the troubles of the ranks, by rank."""

    def __init__(self, troubles: dict[int, Trouble]) -> None:
        super().__init__(show_troubles(troubles))
        self.troubles = troubles


@dataclass
class Case:
    """A function on its ranks.

    Attributes:
        pool: the ranks.
        linear: whether it is linear.
        tolerance: up to which two numbers that should be equal may differ, relative to their size.
        whole: whether whole numbers are drawn, as others are rounded on the way.
        point: where it is differentiated, if it is not linear.
        shapes: of each operand, or None where the ranks' differ.
        out_shapes: of each result.
        readings: those that hold.
        arrows: the strongest of them.
        arrow: the reading that is asked for, as text; None: any.
        name: that of the function.
        gloo: whether what calls torch.distributed is also asked on processes with Gloo.
        assumes: what has to be so for the gradient to be right.
        left_out: what could not be asked, with the reason.
        unasked: why it cannot be judged at all; empty where it can.
        answers: the first-order answers, by pattern.
        line: what a finding about backward points to.
        forward_line: what one about the function points to.
    """

    pool: Pool
    linear: bool = True
    tolerance: float = 1e-9
    whole: bool = False
    point: Point = field(default_factory=Point)
    shapes: list[tuple[int, ...] | None] = field(default_factory=list)
    out_shapes: list[tuple[int, ...] | None] = field(default_factory=list)
    readings: list[Reading] = field(default_factory=list)
    arrows: list[Reading] = field(default_factory=list)
    arrow: str | None = None
    name: str = ""
    gloo: bool = True
    assumes: tuple[str, ...] = ()
    left_out: dict[str, str] = field(default_factory=dict)
    unasked: str = ""
    answers: dict[Pattern, list[list[Answer]]] = field(default_factory=dict)
    line: str | None = None
    forward_line: str | None = None

    def probe(self, seed: int, pattern: Pattern | None = None, **changes: object) -> Probe:
        """A probe of this function."""
        alike, alike_out = pattern or ((), ())
        made = Probe(seed, alike, alike_out, self.whole, point=self.point)
        return replace(made, **changes)  # type: ignore[arg-type]

    def first_order(self, probes: Sequence[Probe]) -> list[list[Answer]]:
        """For each probe, each rank's answer.

        Raises:
            RefusedError: a rank raised.
            LostError: the ranks did not come back.
        """
        return self.answered(first_order, probes)

    def answered(self, question: object, *args: object) -> list[list[Answer]]:
        """The answers to a question with several probes: for each probe, each rank's.

        Raises:
            RefusedError: a rank raised.
            LostError: the ranks did not come back.
        """
        by_rank: list[list[Answer]] = self.pool.ask(question, *args)  # type: ignore[arg-type]
        raised = troubles(by_rank)
        if raised:
            raise RefusedError(raised)
        return [list(row) for row in zip(*by_rank, strict=True)]

    def refused(self, kind: str, error: RefusedError | LostError, what: str) -> Finding:
        """The finding that it raises or hangs, where it was asked."""
        if isinstance(error, LostError):
            verb = "the process ends" if error.kind == "aborts" else "it hangs"
            return Finding(kind, f"{what}: {verb}: {error.text}", error.ranks, self.line)
        first = worst_trouble(error.troubles)
        line = first.line or self.line
        return Finding(kind, f"{what}: {error}", tuple(sorted(error.troubles)), line)


def troubles(by_rank: Sequence[Sequence[Answer]]) -> dict[int, Trouble]:
    """The exceptions of the ranks, by rank."""
    return {
        rank: answer.trouble
        for rank, answers in enumerate(by_rank)
        for answer in answers
        if answer.trouble is not None
    }


def worst_trouble(found: dict[int, Trouble]) -> Trouble:
    """The one to show: it is no rank's that only waited for another one."""
    return min(found.values(), key=lambda trouble: trouble.waited)


def show_troubles(found: dict[int, Trouble]) -> str:
    """The exceptions of the ranks in a line; nothing of none."""
    if not found:
        return ""
    first = worst_trouble(found)
    verb = "waits" if first.waited else "raises"
    text = re.sub(r"\s+", " ", first.first)
    return f"{first.stage} {verb}: {text[:300]}"


def patterns_of(readings: Sequence[Reading]) -> Iterator[Pattern]:
    """What the readings ask to be the same on every rank, each once."""
    yield from dict.fromkeys(reading.pattern for reading in readings)
