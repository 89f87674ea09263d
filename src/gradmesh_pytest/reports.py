"""From the ranks' outcomes to pytest's report: the result of a test, and the first failure with its rank."""

from __future__ import annotations

import copy
import dataclasses
import io
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from _pytest._io import TerminalWriter

from gradmesh.errors import MismatchError, RankError, message
from gradmesh.launch.outcomes import Failure, Outcome, last_place
from gradmesh_pytest import rewriting
from gradmesh_pytest.on_rank import Answer, Attached, Subtest

_LATE = "timed out"
_NOT_TO_RAISE = (KeyboardInterrupt, SystemExit, GeneratorExit)
"""Exceptions that would end the session if they were raised here."""


@dataclasses.dataclass
class Group:
    """Ranks on which the same kind of error was raised at the same line."""

    first: Failure  # the failure that is shown
    same: list[int] = dataclasses.field(default_factory=list)  # the other ranks with the same message
    texts: dict[int, str] = dataclasses.field(default_factory=dict)  # the messages of ranks where they differ
    shown: Any = None  # pytest's representation of the first failure; None: it has no frames


@dataclasses.dataclass
class RankReport:
    """The part of a report that describes the ranks."""

    size: int  # the number of ranks
    groups: list[Group]  # the failures, the first one first; empty if ranks only timed out or disagree
    lines: list[str]  # the outcomes of the other ranks
    # whether the error was raised by `world.run`, so that the test's frames are shown too
    inside: bool = False
    headline: str = ""  # the summary line if there is no failure


@dataclasses.dataclass
class Result:
    """The result of a test."""

    error: BaseException | None = None  # the error to raise; None: it passed
    report: RankReport | None = None  # the description of the ranks for its report, or None


def ranks(numbers: Sequence[int]) -> str:
    """Format a list of ranks.

    >>> ranks([2]), ranks([1, 0, 3])
    ('rank 2', 'ranks 0, 1 and 3')
    """
    *most, last = [str(number) for number in sorted(numbers)]
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"


def result_of(outcome: Outcome, fn: Callable[..., Any], config: pytest.Config) -> Result:
    """The result of a test."""
    answers: dict[int, Answer] = {r: a for r, a in outcome.results.items() if isinstance(a, Answer)}
    hows = {answer.how for answer in answers.values()}
    if not outcome.failures and not outcome.missing and len(hows) == 1:
        return Result(_common(hows.pop(), answers))
    first = min(outcome.failures, key=_order, default=None)
    disagree = bool(hows - {"passed"}) and (first is None or _is_waiting(first)) and not outcome.missing
    # Errors that only report a lost or missing peer are not shown as failures.
    failures = [] if disagree or first is None else [f for f in outcome.failures if _is_independent(f, first)]
    groups = _grouped(failures, fn, config)
    lines = [] if disagree else _others(outcome, answers, failures)
    if disagree:
        error: BaseException = _disagreement(outcome, answers)
    elif first is None:
        error = _late(outcome)
        lines = [line for line in lines if not line.startswith(_LATE)]
    else:
        first = groups[0].first
        error = _raisable(first, outcome.size)
    return Result(error, RankReport(outcome.size, groups, lines, headline=str(error).partition("\n")[0]))


def result_of_subtest(
    ended: Mapping[int, Subtest], size: int, fn: Callable[..., Any], config: pytest.Config
) -> Result:
    """The result of a subtest, from its outcomes on the ranks that ran it."""
    outcome = Outcome(size)
    for rank, subtest in ended.items():
        error = subtest.error
        if error is None:
            outcome.results[rank] = Answer()
        elif isinstance(error, pytest.skip.Exception):
            outcome.results[rank] = Answer("skipped", str(error))
        elif isinstance(error, pytest.xfail.Exception):
            outcome.results[rank] = Answer("xfailed", str(error))
        else:
            outcome.failures.append(Failure(rank, type(error).__name__, str(error), cause=error, when=0.0))
    if outcome.missing and not outcome.failures:
        # Ranks may skip a subtest.
        outcome.results |= {rank: outcome.results[min(outcome.results)] for rank in outcome.missing}
    return result_of(outcome, fn, config)


def _common(how: str, answers: Mapping[int, Answer]) -> BaseException | None:
    if how == "passed":
        return None
    reasons: dict[str, list[int]] = {}
    for rank, answer in sorted(answers.items()):
        reasons.setdefault(answer.reason, []).append(rank)
    outcomes = [f"{ranks(who)}: {reason}" for reason, who in reasons.items()]
    reason = next(iter(reasons)) if len(reasons) == 1 else "; ".join(outcomes)
    if how == "xfailed":
        return pytest.xfail.Exception(reason)
    return pytest.skip.Exception(reason, _use_item_location=True)


def _order(failure: Failure) -> tuple[bool, bool, float]:
    return failure.secondary, _is_waiting(failure), failure.when


def _is_waiting(failure: Failure) -> bool:
    return failure.secondary or failure.kind == "DeadlockError"


def _is_independent(failure: Failure, first: Failure) -> bool:
    return failure is first or (not failure.secondary and (not _is_waiting(failure) or _is_waiting(first)))


def _grouped(failures: Sequence[Failure], fn: Callable[..., Any], config: pytest.Config) -> list[Group]:
    found: dict[object, list[Failure]] = {}
    for failure in sorted(failures, key=_order):
        attached = Attached.of(failure.cause)
        key = (attached.kind, attached.place) if failure.cause is not None else (failure.kind, failure.rank)
        found.setdefault(key, []).append(failure)
    groups = []
    for members in found.values():
        # Show the lowest of the ranks with the same error, because the order of failures is random.
        first, *others = sorted(members, key=lambda failure: (failure.secondary, failure.rank))
        group = Group(first, shown=_shown(first, fn, config))
        for other in others:
            if other.text == first.text:
                group.same.append(other.rank)
            else:
                group.texts[other.rank] = other.text.partition("\n")[0] or other.kind
        groups.append(group)
    return groups


def _shown(failure: Failure, fn: Callable[..., Any], config: pytest.Config) -> Any:
    attached = Attached.of(failure.cause)
    if attached.shown is not None or failure.cause is None or failure.cause.__traceback__ is None:
        return attached.shown
    return rewriting.show(failure.cause, getattr(fn, "shown", fn), config)


def _others(outcome: Outcome, answers: Mapping[int, Answer], failures: Sequence[Failure]) -> list[str]:
    """The outcomes of the ranks without a shown failure."""
    outcomes: dict[str, list[int]] = {}
    for rank, answer in sorted(answers.items()):
        outcomes.setdefault(answer.text, []).append(rank)
    for failure in outcome.failures:
        if not any(failure is shown for shown in failures):
            outcomes.setdefault("waited for other ranks", []).append(failure.rank)
    for rank in outcome.missing:
        where = last_place(outcome.unfinished.get(rank, ""))
        outcomes.setdefault(f"{_LATE}, stopped at {where}", []).append(rank)
    return [f"{how} ({ranks(who)})" for how, who in outcomes.items()]


def _raisable(failure: Failure, size: int) -> BaseException:
    if failure.cause is not None and not isinstance(failure.cause, _NOT_TO_RAISE):
        return failure.cause
    text = message(
        f"rank {failure.rank} of {size} failed with {failure.kind}",
        op="pytest",
        got=failure.text or "no message",
        remedy=failure.remedy,
    )
    return RankError(text, rank=failure.rank, rank_traceback=failure.traceback)


def _late(outcome: Outcome) -> RankError:
    text = message(
        f"{ranks(outcome.missing)} of {outcome.size} did not return within {outcome.timeout:g} s",
        op="pytest",
        remedy="check the stacks below, or set a longer timeout, e.g. @pytest.mark.world(4, timeout=300)",
    )
    places = [
        f"Stack of rank {rank}:\n\n{_without_plugin(outcome.unfinished.get(rank, '')) or '  not available'}"
        for rank in outcome.missing
    ]
    return RankError("\n\n".join([text, *places]))


def _without_plugin(stack: str) -> str:
    """A stack as text, without the frame of this plugin that called the function."""
    entries = re.split(r"^(?=  File )", stack, flags=re.MULTILINE)
    plugin_file = os.path.join("gradmesh_pytest", "on_rank.py")
    return "".join(entry for entry in entries if plugin_file not in entry.partition("\n")[0]).rstrip()


def _disagreement(outcome: Outcome, answers: Mapping[int, Answer]) -> MismatchError:
    outcomes: dict[str, list[int]] = {}
    for rank, answer in answers.items():
        outcomes.setdefault(answer.text, []).append(rank)
    for failure in outcome.failures:
        where = f", at {last_place(failure.traceback)}" if failure.traceback else ""
        outcomes.setdefault(f"waited for other ranks{where}", []).append(failure.rank)
    return MismatchError.of(
        "pytest.skip or pytest.xfail was called on some ranks only",
        op="pytest",
        expected="the same outcome on every rank",
        got="\n".join(sorted(f"{ranks(who)}: {how}" for how, who in outcomes.items())),
        remedy="make the condition identical on every rank, or use @pytest.mark.skipif on the test",
    )


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
