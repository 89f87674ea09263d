"""What a check returns: findings with their places, and notes on what could not be followed."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from gradmesh.checker.rules import Rule, Severity

__all__ = ["Finding", "Place", "Status", "Verdict"]

Status = Literal["complete", "stopped", "not-run"]
"""All steps ran; the script raised, hung or ended before; nothing could be recorded, so that nothing is known."""


@dataclass(frozen=True)
class Place:
    """A line of the user's program.

    Attributes:
        file: the path, as the user would open it.
        line: the line, from 1.
        function: the function around it, with the classes around that; "<module>" at the top.
        text: the line's source, stripped; empty where it is not known.
    """

    file: str
    line: int
    function: str
    text: str

    def as_json(self) -> dict[str, Any]:
        """The place as values that JSON has."""
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong with the program.

    Attributes:
        rule: which kind of thing.
        message: what was seen here, as a sentence.
        at: where it goes wrong; None where no line of the program is.
        began: where it began, if that is another line.
        ranks: the global ranks that it was seen on; empty where that is unknown.
        subject: what it was seen on: a parameter's name, a Function's, a group's; empty if there is none.
        remedy: how to fix it; the rule's where none is given.
        by_number: whether a number of the program is taken for that of the ranks, which more ranks have to show.
    """

    rule: Rule
    message: str
    at: Place | None
    began: Place | None
    ranks: tuple[int, ...]
    subject: str = ""
    remedy: str = ""
    by_number: bool = False

    def __post_init__(self) -> None:
        if not self.remedy:
            object.__setattr__(self, "remedy", self.rule.remedy)

    @property
    def severity(self) -> Severity:
        """How bad it is: "error" or "warning"."""
        return self.rule.severity

    def as_json(self) -> dict[str, Any]:
        """The finding as values that JSON has."""
        return {
            "rule": self.rule.id,
            "name": self.rule.name,
            "severity": self.severity,
            "message": self.message,
            "at": self.at and self.at.as_json(),
            "began": self.began and self.began.as_json(),
            "ranks": list(self.ranks),
            "subject": self.subject,
            "remedy": self.remedy,
        }


@dataclass(frozen=True)
class Verdict:
    """What a check found.

    Attributes:
        findings: what is wrong.
        notes: what could not be followed, as sentences.
        ranks: on how many ranks the script ran.
        steps: how many optimizer steps were seen, and
        followed: how many of them were followed, so that their gradients were checked; None where it was not counted.
        seconds: how long things took, by name: "script" without the checker, "checked" under it, where they are known.
        status: whether all of it ran.
    """

    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    ranks: int
    steps: int
    seconds: dict[str, float] = field(default_factory=dict)
    status: Status = "complete"
    followed: int | None = None

    @property
    def errors(self) -> tuple[Finding, ...]:
        """The findings that are errors."""
        return tuple(finding for finding in self.findings if finding.severity == "error")

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """The findings that are warnings."""
        return tuple(finding for finding in self.findings if finding.severity == "warning")

    @property
    def ok(self) -> bool:
        """Whether all of it ran, and there is no error."""
        return self.status == "complete" and not self.errors

    def as_json(self) -> dict[str, Any]:
        """The verdict as values that JSON has."""
        return {
            "status": self.status,
            "ok": self.ok,
            "ranks": self.ranks,
            "steps": self.steps,
            "followed": self.followed,
            "seconds": {name: round(taken, 3) for name, taken in self.seconds.items()},
            "findings": [finding.as_json() for finding in self.findings],
            "notes": list(self.notes),
        }
