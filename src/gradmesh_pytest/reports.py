"""What a report shows of a test that failed on ranks: the first failure with its rank, and how the others differ."""

from __future__ import annotations

import copy
import dataclasses
import io
from typing import Any

import pytest
from _pytest._io import TerminalWriter

from gradmesh_pytest.verdicts import Group, Told, ranks

__all__ = ["amend"]


def amend(report: pytest.TestReport, told: Told) -> None:
    """Show what ranks tell in the place of what was raised for them here."""
    here: Any = report.longrepr
    if here is None or isinstance(here, str | tuple):
        return
    first = told.groups[0] if told.groups else None
    shown = _copied(first.shown if first is not None and first.shown is not None else here)
    if told.inside and first is not None and first.shown is not None:
        _add_caller(shown, here)
    if first is None:
        _set_crash(shown, here, told.headline)
        _only_words(shown)
    else:
        _set_crash(shown, here, f"rank {first.first.rank} of {told.size}: ")
        if first.shown is None:
            _only_words(shown)
        lines = _of_group(first) + told.lines
        if told.size > 1 or lines:
            shown.addsection(f"rank {first.first.rank} of {told.size}", "\n".join(lines), "_")
    for group in told.groups[1:]:
        text = f"{group.first.kind}: {group.first.text}" if group.shown is None else _text(group.shown)
        lines = [text, *_of_group(group)]
        shown.addsection(f"rank {group.first.rank} of {told.size}", "\n".join(lines), "_")
    if first is None and told.lines:
        shown.addsection(f"the other ranks of {told.size}", "\n".join(told.lines), "_")
    report.longrepr = shown


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
    """What the summary says in one line."""
    crash = getattr(shown, "reprcrash", None) or getattr(here, "reprcrash", None)
    if crash is None:
        return
    whole = text if not text.endswith(": ") else text + crash.message
    shown.reprcrash = dataclasses.replace(crash, message=whole)
    if hasattr(shown, "chain"):
        # Reports that are sent, by xdist or of a subtest, keep that of the chain.
        shown.chain = [*shown.chain[:-1], (shown.chain[-1][0], shown.reprcrash, shown.chain[-1][2])]


def _only_words(shown: Any) -> None:
    """Leave out the frames of this plugin: the error is in no frame of the test."""
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
    """Show below what the rank shows where the test called `world.run`, without its error, which says it again."""
    trace = copy.copy(here.reprtraceback)
    entries = list(trace.reprentries)
    if not entries or not hasattr(entries[-1], "lines"):
        return
    last = copy.copy(entries[-1])
    errors = [line for line in last.lines if line.startswith("E ")]
    last.lines = [line for line in last.lines if not line.startswith("E ")] + errors[:1]
    trace.reprentries = [*entries[:-1], last]
    chain = list(getattr(shown, "chain", [(shown.reprtraceback, shown.reprcrash, None)]))
    chain[-1] = (*chain[-1][:2], "The rank ran what the test gave to its world here:")
    if hasattr(shown, "chain"):
        shown.chain = [*chain, (trace, shown.reprcrash, None)]
