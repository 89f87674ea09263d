"""One cell of a table: a case in a mode on ranks of a system, and the verdict on what came back."""

from __future__ import annotations

import datetime
import os
import re
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.modes.mode import MODES, Found, Mode, expected, measured
from benchmarks.systems.cases import CASES, RANKS, Case
from benchmarks.systems.system import Setting, System, find
from gradmesh import DeadlockError, I, P, R

__all__ = ["VERDICTS", "Raised", "Report", "Verdict", "judge", "on_rank"]

_here = threading.local()
"""What a rank keeps from one run to the next, be it a process or a thread: `.group`, the group of the last cell."""

EXACT = 1e-10
"""The largest deviation, relative to the largest entry, that counts as rounding in float64."""

VERDICTS = {
    "ok": "equal to the dense program, value and derivatives",
    "refused": "every rank raised, and the error is the system's own or says what is not supported",
    "wrong": "returned without an error, and differs from the dense program",
    "error": "raised something else, or not on every rank",
    "hang": "a rank waited for another one until the timeout",
    "abort": "a process was killed by a signal",
    "n/a": "the system has no such verb, or the mode has no meaning for it",
}


@dataclass(frozen=True)
class Verdict:
    """What a cell shows, and the note that explains it."""

    word: str
    note: str = ""


@dataclass(frozen=True)
class Raised:
    """An error on a rank: its text, whether the system itself raised it, whether it only waited in vain."""

    text: str
    own: bool
    late: bool


Report = Found | Raised | None
"""What a rank tells; None from one that does not take part."""

_LATE = re.compile(r"timed? ?out|wait timeout", re.IGNORECASE)
_TRACED = re.compile(r"raised exception (\w+)\(['\"](.+?)(?:\\n|['\"]\))")
"""How a compiler quotes an error that the code it follows raises."""

_STATED = re.compile(
    r"not? (yet )?(been )?(implement|support)|does ?n[o']t support|unsupported|only support|must (override|implement)|"
    r"cannot be|can ?not redistribute|not allowed",
    re.IGNORECASE,
)


def on_rank(where: str, case: str, mode: str, timeout: float, quiet: bool) -> Report:
    """Run one cell on this rank of the world, in a group of its own with a timeout of its own.

    Args:
        where: the system.
        case: its name.
        mode: its name.
        timeout: seconds that a collective may wait.
        quiet: whether the process is there for this alone, and may lose what C++ prints about its own death.
    """
    if quiet:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stderr.fileno())
    warnings.simplefilter("ignore") if quiet else None
    system, members = find(where), MODES[mode].members
    if (last := getattr(_here, "group", None)) is not None:
        dist.destroy_process_group(last)  # not earlier: a rank that waits would see its peer go, and not wait
    _here.group = None
    group = dist.new_group(members, timeout=datetime.timedelta(seconds=timeout))
    if dist.get_rank() not in members:
        return None
    _here.group = group
    setting = Setting(group, dist.get_group_rank(group, dist.get_rank()), MODES[mode].layout)
    try:
        op = system.verbs[case](setting)
        with system.session(case, mode) as grad:
            found = measured(op, CASES[case], MODES[mode], setting.rank, grad)
    except Exception as error:
        return _raised(error, system)
    return {name: [t.clone() for t in tensors] for name, tensors in found.items()}


def _raised(error: Exception, system: System) -> Raised:
    chain = list(_causes(error))
    stated = [e for e in chain if _is_own(e, system)]
    reported = stated[-1] if stated else error
    traced = _TRACED.search(str(error))
    if traced and any(f"{os.sep}{name.replace('.', os.sep)}{os.sep}" in str(error) for name in system.own):
        return Raised(f"{traced[1]}: {_first_line(traced[2])}", own=True, late=False)
    late = any(isinstance(e, DeadlockError) or _LATE.search(str(e)) for e in chain)
    return Raised(f"{type(reported).__name__}: {_first_line(str(reported))}", bool(stated), late)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _is_own(error: BaseException, system: System) -> bool:
    """Whether the error says that this is not supported, or was raised by the code of the system on purpose."""
    if _STATED.search(str(error)):
        return True
    if isinstance(error, AssertionError) and not str(error):
        return False
    frames = traceback.extract_tb(error.__traceback__)
    if not frames or not (frames[-1].line or "").startswith("raise"):
        return False
    return any(f"{os.sep}{name.replace('.', os.sep)}" in frames[-1].filename for name in system.own)


def _first_line(text: str) -> str:
    """The first line of an error, without what is different at every run."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "no text")
    line = re.sub(r"\[?(\d+\.){3}\d+\]?:\d+", "<peer>", line)
    line = re.sub(r"(/[\w.+-]+){2,}/", "", line)
    line = re.sub(r"0x[0-9a-f]+|\b\d{5,}\b", "<number>", line)
    return line if len(line) <= 160 else line[:157] + "..."


def judge(case: Case, mode: Mode, reports: Sequence[Report]) -> Verdict:
    """Hold what the ranks tell against the dense program."""
    taking_part = [report for report in reports if report is not None]
    errors = [report for report in taking_part if isinstance(report, Raised)]
    prompt = [error for error in errors if not error.late]
    if len(prompt) == len(taking_part):
        own = all(error.own for error in prompt)
        return Verdict("refused" if own else "error", prompt[0].text)
    if prompt and len(prompt) == len(errors) and mode.name == "unused output":
        # A rank that does not run the backward collective has nothing to refuse.
        return Verdict("refused" if all(error.own for error in prompt) else "error", prompt[0].text)
    if prompt:
        others = "the other waits" if len(errors) > len(prompt) else "the other returns"
        return Verdict("error", f"on one rank: {prompt[0].text}; {others}")
    if errors:
        both = len(errors) == len(taking_part)
        return Verdict("hang", "both ranks wait" if both else "one rank waits, the other has returned")
    found = [report for report in taking_part if isinstance(report, dict)]
    return _compare(case, found, expected(case, mode))


def _compare(case: Case, found: list[Found], dense: Found) -> Verdict:
    users = case.users
    for name, right in dense.items():
        got = [report[name][0] for report in found]
        if name in ("value", "tangent"):
            if case.dst is P:
                got, right = [_total(got)], [_total(right)]
            else:
                got, right = [got[rank] for rank in users], [right[rank] for rank in users]
        elif case.src is R:
            got = [_total(got)]
        elif case.src is I:
            right = right * RANKS
        for mine, wanted in zip(got, right, strict=True):
            if mine.shape != wanted.shape:
                return Verdict("wrong", f"{name}: shape {tuple(mine.shape)} for {tuple(wanted.shape)}")
        scale = max([float(t.abs().max()) for t in right if t.numel()], default=0.0) or 1.0
        error = max(
            [float((a - b).detach().abs().max()) for a, b in zip(got, right, strict=True) if a.numel()],
            default=0,
        )
        if not error <= EXACT * scale:
            share = f"{error / scale:.0%}" if error <= 10 * scale else "more than 1000%"
            return Verdict("wrong", f"{name}: off by {share} of the largest entry")
    return Verdict("ok")


def _total(tensors: list[Tensor]) -> Tensor:
    return torch.stack(tensors).sum(0) if len({t.shape for t in tensors}) == 1 else tensors[0]
