"""A verdict as text for people: each finding with its lines and how to fix it, then notes and a line of counts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from gradmesh.checker.findings import RULES, Finding, Place, Rule, Verdict, numbered, relative, root

if TYPE_CHECKING:
    from rich.console import Console

_COLOURS = {"error": "bold red", "warning": "bold yellow"}


def show(verdict: Verdict, console: Console, base: Path | None = None) -> None:
    """Print what was found; rich omits colours where the console is not a terminal.

    Files are named from `base`; from the repository around the current folder if there is none.
    """
    from rich.text import Text

    def line(*parts: tuple[str, str], by: int = 0) -> None:
        """Wrapped, pushed to the right, and nothing behind it."""
        for wrapped in Text.assemble(*parts).wrap(console, max(8, console.width - by), overflow="fold"):
            wrapped.rstrip()
            console.print(Text(" " * by) + wrapped, soft_wrap=True)

    def place(label: str, where: Place) -> None:
        """In one piece however wide it is, so that it can be found and clicked; then the source."""
        name = f"{relative(where.file, base or root())}:{where.line}"
        inside = f" in {where.function}" if where.function else ""
        console.print(Text.assemble("  ", (label, "dim"), (name, "cyan"), inside), soft_wrap=True)
        if where.text:
            line((where.text, "bold"), by=6)

    for finding in verdict.findings:
        head = [
            (f"{finding.severity:<7} ", _COLOURS[finding.severity]),
            (f"{finding.rule.id} {finding.rule.name}", "bold"),
        ]
        later = f"step {finding.step}" if finding.step and finding.step > 1 else ""
        parts = ", ".join(filter(None, (finding.subject, ranks_of(finding.ranks, verdict.ranks), later)))
        line(*head, (f": {parts}" if parts else "", ""))
        line((finding.message, ""), by=2)
        if finding.at:
            place("first differs at " if finding.received else "at ", finding.at)
        if finding.received:
            place("received at ", finding.received)
        if finding.began and finding.began != finding.at:
            place("began at ", finding.began)
        line(("fix: ", "dim"), (finding.remedy, ""), by=2)
        console.print()
    if rules := sorted({finding.rule.id for finding in verdict.findings}):
        line(("a wrong and a right program: ", "dim"), (f"gradmesh explain {' '.join(rules)}", "cyan"))
    for note in verdict.notes:
        line(("note ", "dim"), (note, ""))
    line((summary(verdict), "bold red" if verdict.errors else "bold"))


def show_redistributions(verdict: Verdict, console: Console, base: Path | None = None) -> None:
    """Print what DTensor redistributed without being asked to, the largest first."""
    from rich.table import Table

    if not verdict.redistributions:
        console.print("no redistribution of a DTensor that the program does not write")
        return
    table = Table("line", "operator", "from", "to", "bytes", "times", box=None)
    for each in sorted(verdict.redistributions, key=lambda each: -each.size * each.times):
        where = f"{relative(each.at.file, base or root())}:{each.at.line}" if each.at else ""
        table.add_row(where, each.operator, each.before, each.after, f"{each.size:,}", str(each.times))
    console.print("redistributions of DTensors that the program does not write")
    console.print(table)


def summary(verdict: Verdict) -> str:
    """The verdict in a line: counts, what ran, and how long it took."""
    counts = [
        counted(len(found), noun)
        for found, noun in ((verdict.errors, "error"), (verdict.warnings, "warning"))
        if found
    ]
    ran = f"{counted(verdict.ranks, 'rank')}, {counted(verdict.steps, 'step')}"
    nothing = "no finding"
    if verdict.followed is not None and not verdict.errors and verdict.status != "not-run":
        ran = f"{counted(verdict.ranks, 'rank')}, {verdict.followed} of {counted(verdict.steps, 'step')} checked"
        nothing = nothing if verdict.followed else "nothing was checked, which is not a pass"
    status = {"complete": "", "stopped": "stopped before the end", "not-run": "it did not run"}
    parts = (", ".join(counts) or nothing, ran, _times(verdict), status[verdict.status])
    return "; ".join(filter(None, parts))


def counted(number: int, noun: str) -> str:
    """A number of things.

    >>> counted(1, "rank"), counted(2, "rank")
    ('1 rank', '2 ranks')
    """
    return f"{number} {noun}{'' if number == 1 else 's'}"


def ranks_of(ranks: Sequence[int], size: int) -> str:
    """Ranks in words; nothing if there are none.

    >>> ranks_of((0, 1, 2, 5), 8), ranks_of((1,), 8), ranks_of((0, 1), 2)
    ('ranks 0-2, 5', 'rank 1', 'all ranks')
    """
    own = sorted(set(ranks))
    if not own or len(own) == 1:
        return "".join(f"rank {rank}" for rank in own)
    return "all ranks" if len(own) == size else f"ranks {', '.join(_runs(own))}"


def _runs(ranks: Sequence[int]) -> Iterator[str]:
    first = ranks[0]
    for rank, following in zip(ranks, [*ranks[1:], None], strict=True):
        if following != rank + 1:
            yield str(first) if first == rank else f"{first}{'-' if rank > first + 1 else ', '}{rank}"
            first = rank if following is None else following


def _times(verdict: Verdict) -> str:
    """Seconds by name, and the memory."""
    times = [f"{name} {taken:.1f} s" for name, taken in verdict.seconds.items()]
    return ", ".join(times + [f"{verdict.memory / 2**30:.1f} GiB"] * bool(verdict.memory))


_SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
_INDEX = {identifier: index for index, identifier in enumerate(RULES)}


def sarif(
    verdict: Verdict, *, version: str, script: str | None = None, base: Path | None = None
) -> dict[str, Any]:
    """The verdict as a SARIF log of one run.

    A finding's fingerprint is also given as primaryLocationLineHash, by which code hosts tell whether an alert is
    new: else they take a hash of the lines around, and an edit beside the line opens the alert again. Rules have no
    helpUri, which has to be absolute: what the rule's page says stands in help.

    Findings without a place are shown at the first line of the script, the file that was run. Files are named from
    `base`; from the repository around the current folder if there is none.
    """
    base = base or root()
    results = [
        _result(finding, f"{key}:{number}", script, base)
        for finding, key, number in numbered(verdict.findings, base)
    ]
    return {
        "$schema": _SCHEMA,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {
                    "driver": {
                        "name": "gradmesh check",
                        "semanticVersion": version,
                        "rules": [_descriptor(rule) for rule in RULES.values()],
                    }
                },
                "invocations": [
                    {
                        "executionSuccessful": verdict.status == "complete",
                        "toolExecutionNotifications": [
                            {"level": "note", "message": {"text": note}} for note in verdict.notes
                        ],
                    }
                ],
                "columnKind": "unicodeCodePoints",
                "properties": {
                    "ranks": verdict.ranks,
                    "steps": verdict.steps,
                    "seconds": {name: round(taken, 3) for name, taken in verdict.seconds.items()},
                },
                "results": results,
            }
        ],
    }


def _descriptor(rule: Rule) -> dict[str, Any]:
    return {
        "id": rule.id,
        "name": "".join(word.capitalize() for word in rule.name.split("-")),
        "shortDescription": {"text": rule.short},
        "fullDescription": {"text": f"{rule.short} {rule.why}"},
        "help": {
            "text": f"{rule.why}\n\nTo fix it: {rule.remedy}",
            "markdown": f"**{rule.short}**\n\n{rule.why}\n\n**To fix it.** {rule.remedy}\n\n"
            f"A wrong and a right program: `gradmesh explain {rule.id}`.",
        },
        "defaultConfiguration": {"level": rule.severity},
        "properties": {"page": rule.page, "tags": ["correctness", "distributed"], "precision": "high"},
    }


def _result(finding: Finding, key: str, script: str | None, base: Path) -> dict[str, Any]:
    began = finding.began if finding.began not in (None, finding.at) else None
    text = finding.message if finding.message.endswith((".", "!", "?")) else f"{finding.message}."
    if began and finding.at:
        text += f" It began [here](1), at {relative(began.file, base)}:{began.line}."
    if finding.received:
        place = f"{relative(finding.received.file, base)}:{finding.received.line}"
        text += f" The wrong gradient is received [here]({2 if began and finding.at else 1}), at {place}."
    at = finding.at or finding.began or (Place(script, 1, "", "") if script else None)
    result: dict[str, Any] = {
        "ruleId": finding.rule.id,
        "ruleIndex": _INDEX[finding.rule.id],
        "level": finding.severity,
        "message": {"text": f"{text} To fix it: {finding.remedy}"},
        "locations": [_location(at, base)] if at else [],
        "partialFingerprints": {"gradmeshCheck/v1": key, "primaryLocationLineHash": key},
        "properties": {"ranks": list(finding.ranks), "subject": finding.subject},
    }
    related = [(began, "where it began")] if began and finding.at else []
    related += [(finding.received, "where it is received")] if finding.received else []
    if related:
        result["relatedLocations"] = [
            {"id": number, "message": {"text": text}, **_location(place, base)}
            for number, (place, text) in enumerate(related, 1)
        ]
    return result


def _location(place: Place, base: Path) -> dict[str, Any]:
    name = relative(place.file, base)
    region: dict[str, Any] = {"startLine": max(1, place.line)}
    if place.text:
        region["snippet"] = {"text": place.text}
    uri = Path(name).as_uri() if Path(name).is_absolute() else quote(name)
    found: dict[str, Any] = {"physicalLocation": {"artifactLocation": {"uri": uri}, "region": region}}
    if place.function:
        found["logicalLocations"] = [{"fullyQualifiedName": place.function, "kind": "function"}]
    return found
