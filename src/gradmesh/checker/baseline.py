"""Findings that are known: written to a file once, and hidden from then on for as long as they occur."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradmesh.checker.findings import Finding
from gradmesh.checker.fingerprints import fingerprint, place_of, relative, root
from gradmesh.errors import ArgumentError, message

__all__ = ["Known", "Sorted", "beside", "read", "write"]

_VERSION = 1


@dataclass(frozen=True)
class Known:
    """A finding of a baseline.

    Attributes:
        fingerprint: what it is known by.
        rule: the rule's id.
        where: file and function, for people.
        subject: what it was seen on.
    """

    fingerprint: str
    rule: str
    where: str
    subject: str

    def __str__(self) -> str:
        return f"{self.rule} {self.where}" + (f" ({self.subject})" if self.subject else "")


@dataclass(frozen=True)
class Sorted:
    """Findings beside a baseline.

    Attributes:
        new: those that it does not have.
        hidden: those that it has.
        gone: what it has and no longer occurs.
    """

    new: tuple[Finding, ...]
    hidden: tuple[Finding, ...]
    gone: tuple[Known, ...]


def write(path: Path, findings: Sequence[Finding], base: Path | None = None) -> None:
    """Write what is found as a baseline, one finding a line, so that a change of it can be read."""
    known = sorted((_known(finding, base or root()) for finding in findings), key=str)
    lines = ",\n".join("  " + json.dumps(vars(each)) for each in known)
    path.write_text(f'{{"version": {_VERSION}, "findings": [\n{lines}\n]}}\n')


def read(path: Path) -> tuple[Known, ...]:
    """The findings of a baseline.

    Raises:
        ArgumentError: the file is none.
    """
    try:
        data: Any = json.loads(path.read_text())
        if data["version"] != _VERSION:
            raise ValueError(f"version {data['version']}")
        return tuple(Known(**each) for each in data["findings"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArgumentError(
            message(
                f"{path} is not a readable baseline",
                op="check",
                expected=f"a file of --write-baseline, version {_VERSION}",
                got=f"{type(error).__name__}: {error}",
                remedy=f"write it with --write-baseline {path}",
            )
        ) from error


def beside(findings: Sequence[Finding], known: Sequence[Known], base: Path | None = None) -> Sorted:
    """What is new, what is known, and what is gone. A fingerprint hides as many findings as the baseline has of it."""
    base = base or root()
    left = Counter(each.fingerprint for each in known)
    new: list[Finding] = []
    hidden: list[Finding] = []
    for finding in findings:
        key = fingerprint(finding, base)
        (hidden if left[key] > 0 else new).append(finding)
        left[key] -= 1
    gone = []
    for each in reversed(known):
        if left[each.fingerprint] > 0:
            left[each.fingerprint] -= 1
            gone.append(each)
    return Sorted(tuple(new), tuple(hidden), tuple(reversed(gone)))


def _known(finding: Finding, base: Path) -> Known:
    place = place_of(finding)
    where = f"{relative(place.file, base)}:{place.function}" if place.file else "nowhere"
    return Known(fingerprint(finding, base), finding.rule.id, where, finding.subject)
