"""A verdict as SARIF 2.1.0, the format in which code hosts take findings."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import quote

from gradmesh.checker.findings import Finding, Place, Verdict
from gradmesh.checker.fingerprints import numbered, relative, root
from gradmesh.checker.rules import RULES, Rule

__all__ = ["sarif"]

_SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
_INDEX = {identifier: index for index, identifier in enumerate(RULES)}


def sarif(
    verdict: Verdict, *, version: str, script: str | None = None, base: Path | None = None
) -> dict[str, Any]:
    """The verdict as a SARIF log of one run.

    A finding's fingerprint is also given as primaryLocationLineHash, by which code hosts tell whether an alert is
    new: else they take a hash of the lines around, and an edit beside the line opens the alert again. Rules have no
    helpUri, which has to be absolute: what the rule's page says stands in help.

    Args:
        verdict: what was found.
        version: of gradmesh.
        script: the file that was run; findings without a place are shown at its first line.
        base: the folder that files are named from; the repository around the current folder if there is none.
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
                "invocations": [_invocation(verdict)],
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
    if began and finding.at:
        result["relatedLocations"] = [
            {"id": 1, "message": {"text": "where it began"}, **_location(began, base)}
        ]
    return result


def _location(place: Place, base: Path) -> dict[str, Any]:
    name = relative(place.file, base)
    region: dict[str, Any] = {"startLine": max(1, place.line)}
    if place.text:
        region["snippet"] = {"text": place.text}
    found: dict[str, Any] = {"physicalLocation": {"artifactLocation": {"uri": _uri(name)}, "region": region}}
    if place.function:
        found["logicalLocations"] = [{"fullyQualifiedName": place.function, "kind": "function"}]
    return found


def _uri(name: str) -> str:
    return Path(name).as_uri() if Path(name).is_absolute() else quote(name)


def _invocation(verdict: Verdict) -> dict[str, Any]:
    return {
        "executionSuccessful": verdict.status == "complete",
        "toolExecutionNotifications": [
            {"level": "note", "message": {"text": note}} for note in verdict.notes
        ],
    }
