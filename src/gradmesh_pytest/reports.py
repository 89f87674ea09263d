"""The pytest report of a test that failed on ranks: the first failure with its rank, and the other ranks."""

from __future__ import annotations

import copy
import dataclasses
import io
from typing import Any

import pytest
from _pytest._io import TerminalWriter

from gradmesh_pytest.results import Group, RankReport, ranks

__all__ = ["amend"]


def amend(test: pytest.TestReport, report: RankReport) -> None:
    """Replace the failure in a report by the failures of the ranks."""
    here: Any = test.longrepr
    if here is None or isinstance(here, str | tuple):
        return
    first = report.groups[0] if report.groups else None
    shown = _copied(first.shown if first is not None and first.shown is not None else here)
    if report.inside and first is not None and first.shown is not None:
        _add_caller(shown, here)
    if first is None:
        _set_crash(shown, here, report.headline)
        _without_frames(shown)
    else:
        _set_crash(shown, here, f"rank {first.first.rank} of {report.size}: ")
        if first.shown is None:
            _without_frames(shown)
        lines = _of_group(first) + report.lines
        if report.size > 1 or lines:
            shown.addsection(f"rank {first.first.rank} of {report.size}", "\n".join(lines), "_")
    for group in report.groups[1:]:
        text = f"{group.first.kind}: {group.first.text}" if group.shown is None else _text(group.shown)
        lines = [text, *_of_group(group)]
        shown.addsection(f"rank {group.first.rank} of {report.size}", "\n".join(lines), "_")
    if first is None and report.lines:
        shown.addsection(f"the other ranks of {report.size}", "\n".join(report.lines), "_")
    test.longrepr = shown


def _of_group(group: Group) -> list[str]:
    lines = [f"the same on {ranks(group.same)}"] if group.same else []
    return lines + [f"rank {rank}: {text}" for rank, text in sorted(group.texts.items())]


def _text(shown: Any) -> str:
    stream = io.StringIO()
    shown.toterminal(TerminalWriter(stream))
    return stream.getvalue().strip("\n")


def _copied(shown: Any) -> Any:
    new = copy.copy(shown)
    new.sections = list(getattr(shown, "sections", ()))
    return new


def _set_crash(shown: Any, here: Any, text: str) -> None:
    """Set the line of pytest's short summary."""
    crash = getattr(shown, "reprcrash", None) or getattr(here, "reprcrash", None)
    if crash is None:
        return
    whole = text if not text.endswith(": ") else text + crash.message
    shown.reprcrash = dataclasses.replace(crash, message=whole)
    if hasattr(shown, "chain"):
        # Serialized reports (xdist, subtests) use the crash entry of the chain.
        shown.chain = [*shown.chain[:-1], (shown.chain[-1][0], shown.reprcrash, shown.chain[-1][2])]


def _without_frames(shown: Any) -> None:
    """Remove the frames of this plugin; the error was not raised in a frame of the test."""
    entries = getattr(getattr(shown, "reprtraceback", None), "reprentries", None)
    if not entries:
        return
    last = copy.copy(entries[-1])
    lines = getattr(last, "lines", [])
    last.lines = [line for line in lines if line.startswith("E ")] or lines
    for name in ("reprfuncargs", "reprlocals", "reprfileloc"):
        if hasattr(last, name):
            setattr(last, name, None)
    trace = copy.copy(shown.reprtraceback)
    trace.reprentries = [last]
    shown.reprtraceback = trace
    if hasattr(shown, "chain"):
        shown.chain = [(trace, shown.reprcrash, None)]


def _add_caller(shown: Any, here: Any) -> None:
    """Append the line where the test called `world.run`, without repeating the error."""
    trace = copy.copy(here.reprtraceback)
    entries = list(trace.reprentries)
    if not entries or not hasattr(entries[-1], "lines"):
        return
    last = copy.copy(entries[-1])
    errors = [line for line in last.lines if line.startswith("E ")]
    last.lines = [line for line in last.lines if not line.startswith("E ")] + errors[:1]
    trace.reprentries = [*entries[:-1], last]
    chain = list(getattr(shown, "chain", [(shown.reprtraceback, shown.reprcrash, None)]))
    chain[-1] = (*chain[-1][:2], "The rank ran the function that the test passed to world.run here:")
    if hasattr(shown, "chain"):
        shown.chain = [*chain, (trace, shown.reprcrash, None)]
