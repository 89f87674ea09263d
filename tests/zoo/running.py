"""Hands a program of the zoo to its check, and says whether the report is right."""

from __future__ import annotations

import dataclasses
import time
import traceback
import warnings
from typing import Any

import gradmesh as gm
from tests.zoo.program import Program

__all__ = ["Outcome", "run"]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a check said of a program.

    Attributes:
        name: the program's.
        reported: the kinds of an audit, the worst first; else the hypothesis of the diagnosis, or, where none fits and
            the losses or parameters of one process came out different, that; "raises" where the program raised; empty
            where nothing was found.
        text: the report.
        seconds: what the check took.
    """

    name: str
    reported: tuple[str, ...]
    text: str
    seconds: float

    def right(self, program: Program) -> bool:
        """Whether that is what had to be said: the expected kind, and none that is not true of the program."""
        if program.expected is None:
            return not self.reported
        found = set(self.reported)
        allowed = {program.expected} | program.also
        if program.check == "audit":
            return program.expected in found and found <= allowed
        return bool(found) and found <= allowed


def run(program: Program) -> Outcome:
    """Run one program under its check."""
    started = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            reported, text = _audited(program) if program.check == "audit" else _checked(program)
        except gm.GradmeshError as error:
            reported, text = ("raises",), str(error)
        except Exception:  # a check that fails by itself is a report that is wrong
            reported, text = ("the check raises",), traceback.format_exc()
    return Outcome(program.name, reported, text, time.perf_counter() - started)


def _audited(program: Program) -> tuple[tuple[str, ...], str]:
    found = gm.verify.audit(program.build, **{"world_size": 2, "gloo": False, **program.options})
    return tuple(dict.fromkeys(finding.kind for finding in found.findings)), str(found)


def _checked(program: Program) -> tuple[tuple[str, ...], str]:
    options: dict[str, Any] = {"world_size": 2, **program.options, "raise_exception": False}
    report: gm.verify.GradcheckReport | gm.verify.SingleReport
    if program.check == "gradcheck":
        report = gm.verify.gradcheck(*program.build(), **options)
    else:
        report = gm.verify.same_as_single(**program.build(), **options)
    if report.ok:
        return (), str(report)
    said = "no diagnosis" if report.diagnosis is None else report.diagnosis.hypothesis
    if isinstance(report, gm.verify.SingleReport) and said in ("no diagnosis", "none fits"):
        said = f"{report.first[0].kind} differs"
    return (said,), str(report)
