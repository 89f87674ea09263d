"""The function under audit, shared by all checks: its ranks, its properties, and results so far."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from gradmesh.verify.auditing.pool import Pool, RanksLostError
from gradmesh.verify.auditing.probes import Answer, Point, Probe, first_order
from gradmesh.verify.auditing.readings import Pattern, Reading
from gradmesh.verify.auditing.report import Finding
from gradmesh.verify.auditing.subject import Failure

__all__ = ["Case", "FunctionRaisedError", "failures", "patterns_of", "show_failures", "worst_failure"]


class FunctionRaisedError(Exception):
    """The function raised; holds each rank's exception."""

    def __init__(self, failures: dict[int, Failure]) -> None:
        super().__init__(show_failures(failures))
        self.failures = failures


@dataclass
class Case:
    """The function under audit.

    Attributes:
        pool: the ranks.
        linear: whether it is linear.
        tolerance: the relative difference up to which two numbers count as equal.
        whole: whether to draw integers, because the function rounds other values.
        point: where to differentiate it, if it is not linear.
        shapes: the shape of each operand; None where it differs between ranks.
        out_shapes: the shape of each result; None where it differs between ranks.
        readings: the readings that hold.
        arrows: the strongest of them.
        arrow: the requested reading, as text; None: any.
        name: the function's name.
        gloo: whether to also test functions that call torch.distributed on processes with Gloo.
        assumes: the conditions under which the gradient is correct.
        left_out: kinds that could not be checked, with the reason.
        unchecked: why nothing can be checked; empty otherwise.
        answers: the first-order answers, by pattern.
        line: "file:line" for findings about backward.
        forward_line: "file:line" for findings about forward.
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
    unchecked: str = ""
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
            FunctionRaisedError: a rank raised.
            RanksLostError: a rank died or timed out.
        """
        return self.answered(first_order, probes)

    def answered(self, question: object, *args: object) -> list[list[Answer]]:
        """Run a function of several probes on every rank: for each probe, each rank's answer.

        Raises:
            FunctionRaisedError: a rank raised.
            RanksLostError: a rank died or timed out.
        """
        by_rank: list[list[Answer]] = self.pool.ask(question, *args)  # type: ignore[arg-type]
        raised = failures(by_rank)
        if raised:
            raise FunctionRaisedError(raised)
        return [list(row) for row in zip(*by_rank, strict=True)]

    def failure(self, kind: str, error: FunctionRaisedError | RanksLostError, what: str) -> Finding:
        """The finding that the function raised, crashed or hung."""
        if isinstance(error, RanksLostError):
            verb = "the process exits" if error.kind == "aborts" else "the call hangs"
            return Finding(kind, f"{what}: {verb}: {error.text}", error.ranks, self.line)
        first = worst_failure(error.failures)
        line = first.line or self.line
        return Finding(kind, f"{what}: {error}", tuple(sorted(error.failures)), line)


def failures(by_rank: Sequence[Sequence[Answer]]) -> dict[int, Failure]:
    """The exceptions of the ranks, by rank."""
    return {
        rank: answer.failure
        for rank, answers in enumerate(by_rank)
        for answer in answers
        if answer.failure is not None
    }


def worst_failure(found: dict[int, Failure]) -> Failure:
    """The exception to show: preferably not from a rank that only waited for another one."""
    return min(found.values(), key=lambda failure: failure.waited)


def show_failures(found: dict[int, Failure]) -> str:
    """The exceptions of the ranks on one line; "" if there are none."""
    if not found:
        return ""
    first = worst_failure(found)
    verb = "waits" if first.waited else "raises"
    text = re.sub(r"\s+", " ", first.first)
    return f"{first.stage} {verb}: {text[:300]}"


def patterns_of(readings: Sequence[Reading]) -> Iterator[Pattern]:
    """The distinct patterns of the readings."""
    yield from dict.fromkeys(reading.pattern for reading in readings)
