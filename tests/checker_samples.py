"""Verdicts to be shown, written and known again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gradmesh.checker.findings import RULES, Finding, Place, Verdict


def finding(rule: str = "GM101", **changes: Any) -> Finding:
    place = Place("train.py", 7, "step", "loss.backward()")
    given = {"message": "the ranks' gradients differ", "at": place, "began": None, "ranks": (0, 1)}
    return Finding(RULES[rule], **{**given, **changes})


def one_of_each(folder: Path, ranks: int = 4) -> Verdict:
    """A finding of every rule, with and without places, subjects and remedies."""
    found = []
    for number, identifier in enumerate(RULES):
        at = Place(
            str(folder / "src" / "a model.py"), 10 + number, "Model.forward", f"y = gather(x, {number})"
        )
        began = Place(
            str(folder / "train.py"), 3, "<module>", "norm = LayerNorm(8)  # [bold]not markup[/bold]"
        )
        found.append(
            finding(
                identifier,
                message=f"seen as number {number}",
                at=None if number % 7 == 3 else at,
                began=began if number % 2 else None,
                ranks=tuple(range(number % (ranks + 1))),
                subject="norm.weight" if number % 3 else "",
                remedy="Do this." if number % 5 == 0 else "",
            )
        )
    return Verdict(tuple(found), ("a cell was not followed",), ranks, 2, {"checked": 5.0})
