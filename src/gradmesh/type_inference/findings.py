"""Findings: types that do not fit, with the line, the types and the remedy."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gradmesh.call_sites import Site, show_site
from gradmesh.errors import message
from gradmesh.type_inference import rules
from gradmesh.type_inference.kinds import Kind, shown
from gradmesh.unsummed import MISSING_SUM

__all__ = ["KINDS", "Condition", "Finding", "began_at", "types_of"]

KINDS = {
    rules.NONLINEAR: (
        "a pending sum goes through an operator that is not linear",
        "sum it first: gm.all_reduce(x, dst=gm.R) or gm.reduce_scatter(x)",
    ),
    rules.PRODUCT: ("two pending sums are multiplied", "sum at least one of them first"),
    rules.VARYING: (
        "a pending sum is multiplied with what differs from rank to rank",
        "sum it first, or declare the product's type with gm.assert_type if the sum of the products is meant",
    ),
    rules.COUNTS: (
        "a value that every rank has is added to a pending sum, and counts once for each rank",
        "add it behind the sum, or gm.convert(x, src=gm.I, dst=gm.P), which keeps it at one rank",
    ),
    rules.READ: (
        "a number is made of a pending sum, of which this rank has one term",
        "sum it first: gm.all_reduce(x, dst=gm.R).item(); of a detached tensor if it is only to be shown",
    ),
    "summed-again": (
        "a value that every rank has is summed over the ranks, and counts once for each rank",
        "leave the sum out, or gm.convert(x, src=gm.I, dst=gm.P) first",
    ),
    "averaged-again": (
        "the mean is taken over the ranks of a value that every rank has: its gradient is too small by their number",
        "leave the mean out",
    ),
    "operand-type": ("the operand is not of the type that this call takes", "see docs/conventions.md"),
    "not-the-same": (
        "a value that is declared the same on every rank, is not",
        "look for what makes it differ (data, dropout, work that only some ranks do), or do not call it R or I",
    ),
    "gradient-differs": (
        "dst=gm.I says that every rank repeats the same work on the result, and the ranks' gradients differ",
        "say dst=gm.R, whose backward sums what each rank finds, or make the ranks do the same",
    ),
    "missing-sum": MISSING_SUM,
    "sum-too-many": (
        "backward begins at a loss that every rank has, and that is made of R values: it counts once for each rank",
        "pass dst=gm.I if the ranks do identical work on the result, or call gradmesh.objective(loss, loss_type=gm.R); "
        "correct as it is if gradients are averaged afterwards",
    ),
    "declared-gradient": (
        "the gradient that arrives is not of the dual type",
        "see docs/conventions.md: what is used differently on each rank is R, and its gradient has to be summed",
    ),
    "declared-otherwise": ("a tensor is declared as what it is not", "declare what it is, or convert it"),
}
"""Each kind of finding: the problem, and what to do."""


@dataclass(frozen=True)
class Finding:
    """Types that do not fit.

    Attributes:
        kind: which, one of a few words, such as "counts-many-times".
        op: the operator or verb.
        axis: the name of the axis.
        types: what the operands are, each with its shape.
        file: the file of the user's code, "" where there is none.
        line: the line in it.
        began: where what is at fault came from, as text; "" where that is the same line.
        took: what the operator takes, "" where the problem says it.
    """

    kind: str
    op: str
    axis: str
    types: str
    file: str
    line: int
    began: str = ""
    took: str = ""

    @classmethod
    def at(
        cls, kind: str, op: str, axis: str, types: str, site: Site, began: str = "", took: str = ""
    ) -> Finding:
        """Made with a call site."""
        file, line = (site[0].co_filename, site[1]) if site else ("", 0)
        return cls(kind, op, axis, types, file, line, began, took)

    def __str__(self) -> str:
        problem, remedy = KINDS[self.kind]
        got = f"{self.op} of {self.types}\nat {self.file}:{self.line}" + (
            f"\n{self.began}" if self.began else ""
        )
        return message(
            f"{problem} ({self.kind})",
            op="typed",
            axis=repr(self.axis),
            expected=self.took or None,
            got=got,
            remedy=remedy,
        )

    @property
    def short(self) -> str:
        """The kind, the operator and the line."""
        return f"{self.kind}: {self.op} at {os.path.basename(self.file)}:{self.line}"


@dataclass(frozen=True)
class Condition:
    """A finding that holds if the ranks turn out to agree, or not to.

    Attributes:
        tell: makes the finding.
        axis: the place of the axis.
        present: numbers that have to be found on every rank.
        absent: numbers that must not, of which at least one is not.
        own: a number of the finding itself, which tells whether every rank has it.
        averaged: whether it is none where gradients are averaged afterwards.
        doubtful: what to note in the place of a finding, where it may be none.
    """

    tell: Callable[[], Finding]
    axis: int
    present: tuple[int, ...]
    own: int
    absent: tuple[int, ...] = ()
    averaged: bool = False
    doubtful: str = ""


def types_of(kinds: Sequence[tuple[Kind, tuple[int, ...]]]) -> str:
    """Types and shapes as text."""
    return ", ".join(f"{shown(kind) or 'unknown'}{list(shape)}" for kind, shape in kinds)


def began_at(op: str, site: Site) -> str:
    """Where something began, as text."""
    return f"began with {op} {show_site(site)}" if site else ""
