"""The result of an audit: findings, readings, and kinds that were not checked."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gradmesh.verify.auditing.kinds import KINDS, SEVERITIES

__all__ = ["Audit", "Finding", "shown"]

_WIDTH = 112
"""Columns of an audit or a finding as a str; the command uses the terminal's."""


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong with the function.

    Attributes:
        kind: a name in `KINDS`.
        text: what was observed.
        ranks: the ranks on which it was observed; empty if unknown.
        line: "file:line" of the code that causes it, if known.
    """

    kind: str
    text: str
    ranks: tuple[int, ...] = ()
    line: str | None = None

    @property
    def severity(self) -> str:
        """One of "error", "warning" and "note"."""
        return KINDS[self.kind].severity

    @property
    def remedy(self) -> str:
        """What to change."""
        return KINDS[self.kind].remedy

    def as_json(self) -> dict[str, Any]:
        """The finding as a JSON-serializable dict."""
        return {
            "kind": self.kind,
            "severity": self.severity,
            "text": self.text,
            "ranks": list(self.ranks),
            "line": self.line,
        }

    def __str__(self) -> str:
        return "\n".join(_finding_lines(self, _WIDTH))


@dataclass(frozen=True)
class Audit:
    """The result of an audit.

    Attributes:
        name: the name of the audited function.
        world_size: the number of ranks.
        backend: the backend.
        arrows: the strongest typed readings under which backward is the adjoint, such as "V -> R". Readings that
            follow from them are omitted here; `holds` includes them.
        findings: what is wrong, most severe first; empty if nothing is.
        linear: whether the function is linear in its operands. If not, its derivative was audited, computed by finite
            differences.
        left_out: kinds that were not checked, each with the reason.
        seconds: the duration of the audit.
        readings: every typed reading that holds.
        arrow: the requested reading; None if none was requested.
        assumes: conditions under which the gradient is correct, as sentences; e.g. that all ranks compute the same
            loss, if backward does not sum the ranks' gradients.
        required: the kinds that the caller named; empty if none.
    """

    name: str
    world_size: int
    backend: str
    arrows: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    linear: bool = True
    left_out: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    readings: frozenset[str] = frozenset()
    arrow: str | None = None
    assumes: tuple[str, ...] = ()
    required: frozenset[str] = frozenset()

    @property
    def ok(self) -> bool:
        """True if there are no errors or warnings. Notes count only if the caller named their kind."""
        return not self._failures

    @property
    def _failures(self) -> list[Finding]:
        return [one for one in self.findings if one.severity != "note" or one.kind in self.required]

    @property
    def kinds(self) -> tuple[str, ...]:
        """The distinct kinds of the findings, most severe first."""
        return tuple(dict.fromkeys(finding.kind for finding in self.findings))

    def holds(self, arrow: str) -> bool:
        """Whether backward is the adjoint under a reading, including those implied by a stronger one.

        Args:
            arrow: such as "V -> R", or "V, I -> R" if operands differ in type.
        """
        return arrow in self.readings

    def as_json(self) -> dict[str, Any]:
        """The audit as a JSON-serializable dict."""
        return {
            "name": self.name,
            "world_size": self.world_size,
            "backend": self.backend,
            "ok": self.ok,
            "linear": self.linear,
            "arrows": list(self.arrows),
            "arrow": self.arrow,
            "assumes": list(self.assumes),
            "findings": [finding.as_json() for finding in self.findings],
            "left_out": dict(self.left_out),
            "seconds": round(self.seconds, 3),
        }

    def json(self) -> str:
        """The audit as one line of JSON."""
        return json.dumps(self.as_json())

    def __str__(self) -> str:
        return shown(self, _WIDTH + 2)


def shown(audit: Audit, width: int) -> str:
    """The audit in lines of at most this many columns."""
    count = len(audit._failures)
    notes = len(audit.findings) - count
    head = f"{audit.name}: {'no finding' if audit.ok else f'{count} finding' + 's' * (count > 1)}"
    head += f", {notes} note" + "s" * (notes > 1) if notes else ""
    lines = _wrapped(
        f"{head} ({audit.world_size} ranks, {audit.backend}, {audit.seconds:.1f} s)", width, 0, 2
    )
    facts = [f"backward is the adjoint as {'; '.join(audit.arrows)}"] if audit.arrows else []
    facts += audit.assumes
    if not audit.linear and "not-adjoint" not in audit.left_out:
        facts.append("not linear: audited its derivative, by finite differences")
    lines += [line for one in facts for line in _wrapped(one, width, 2, 4)]
    lines += [f"  {line}" for finding in audit.findings for line in _finding_lines(finding, width - 2)]
    for kind, reason in audit.left_out.items():
        lines += _wrapped(f"not checked: {kind}: {reason}", width, 2, 4)
    return "\n".join(lines)


def _finding_lines(finding: Finding, width: int) -> list[str]:
    on = (
        ""
        if not finding.ranks
        else f" on rank{'s' * (len(finding.ranks) > 1)} {', '.join(map(str, finding.ranks))}"
    )
    parts = [
        *finding.text.splitlines(),
        *([f"at {finding.line}"] if finding.line else []),
        f"remedy: {finding.remedy}",
    ]
    head = _wrapped(f"{finding.severity:<8} {finding.kind}{on}", width, 0, 9)
    return [*head, *(line for part in parts for line in _wrapped(part, width, 9, 9))]


def _wrapped(text: str, width: int, first: int, rest: int) -> list[str]:
    """The text in lines, indented by `first` and `rest`; a longer word, such as a path, has a line of its own."""
    return textwrap.wrap(
        text,
        max(width, rest + 20),
        initial_indent=" " * first,
        subsequent_indent=" " * rest,
        break_long_words=False,
        break_on_hyphens=False,
    )


def sorted_findings(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """The distinct findings, most severe first."""
    order = list(KINDS)
    unique = dict.fromkeys(findings)
    return tuple(sorted(unique, key=lambda f: (SEVERITIES.index(f.severity), order.index(f.kind))))
