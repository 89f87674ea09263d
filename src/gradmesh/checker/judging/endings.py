"""Programs that do not end well: ranks that raise, that wait, that make other calls than the others."""

from __future__ import annotations

import ast
import linecache
import re
import signal
import sysconfig
from collections.abc import Mapping, Sequence

from gradmesh._util.call_sites import is_of_the_program
from gradmesh.checker.findings import Finding, Place
from gradmesh.checker.judging.context import finding
from gradmesh.checker.recording.tape import Tape

__all__ = ["endings"]

_FOLLOWS = (
    "Connection closed by peer",
    "Connection reset",
    "Broken pipe",
    "Timed out",
    "timed out",
    "Application timeout",
)
"""What a rank says when another has gone."""

_FRAME = re.compile(r'^  File "(.*)", line (\d+) in ', re.MULTILINE)
"""A line of the stack that Python prints when a signal kills it."""

_PYTHON = sysconfig.get_path("stdlib")

_SAME_SHAPES = ("all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter")


def endings(
    tapes: Sequence[Tape | None],
    calls: Sequence[Sequence[str]],
    output: Sequence[str],
    stuck: bool,
    killed: Mapping[int, int],
) -> list[Finding]:
    """What is wrong with how the ranks ended."""
    raised = [(rank, tape) for rank, tape in enumerate(tapes) if tape is not None and tape.ended == "raised"]
    first = [pair for pair in raised if not any(text in pair[1].error for text in _FOLLOWS)]
    stopped = {rank for rank, tape in enumerate(tapes) if tape is not None and tape.ended == "stopped"}
    ended = all(tape is not None and tape.ended != "raised" for tape in tapes)
    if ended:
        return []
    dead = sorted(rank for rank in killed if tapes[rank] is None)
    # Gloo aborts where what comes does not fit.
    aborted = bool(dead) and killed[dead[0]] == signal.SIGABRT
    if dead and not first and not (aborted and _differing(calls, stopped)):
        return [_killed(dead[0], killed[dead[0]], output[dead[0]])]
    of_calls = stuck or not first or any(text in first[0][1].error for text in ("size", "shape", "mismatch"))
    differ = _differing(calls, stopped) if of_calls else None
    if differ is not None:
        return [differ]
    if first or raised:
        rank, tape = (first or raised)[0]
        places = tape.places
        at = places[tape.raised_at] if 0 <= tape.raised_at < len(places) else None
        return [
            finding("GM501", f"rank {rank} raised {tape.error.splitlines()[0]}", _with_text(at), None, [rank])
        ]
    if stuck:
        waiting = [rank for rank, tape in enumerate(tapes) if tape is None]
        last = [(rank, calls[rank][-1]) for rank in waiting if calls[rank]]
        shown = "; ".join(f"rank {rank}: {_said(line)}" for rank, line in last) or "before any collective"
        at = _place(last[0][1]) if last else None
        return [finding("GM402", f"ranks wait, and nothing happens any more: {shown}", at, None, waiting)]
    gone = [rank for rank, tape in enumerate(tapes) if tape is None]
    said = f"rank {gone[0]} ended without an error message: {output[gone[0]][-300:].strip()}"
    return [finding("GM501", said, None, None, gone)]


def _killed(rank: int, number: int, printed: str) -> Finding:
    """A rank that a signal killed, at the innermost line of the program, as Python printed it at the end."""
    names = {each.value: each.name for each in signal.Signals}
    name = names.get(number, f"signal {number}")  # those of real time have none
    why = ", as one does that has taken all the memory" if name == "SIGKILL" else ""
    stack = printed.partition("Fatal Python error")[2]
    lines = [
        Place(file, int(line), "", "")
        for file, line in _FRAME.findall(stack)
        if is_of_the_program(file) and not file.startswith(_PYTHON)
    ]
    at = _with_text(lines[0]) if lines else None
    return finding("GM501", f"rank {rank} was killed by {name}{why}", at, None, [rank])


def _differing(calls: Sequence[Sequence[str]], stopped: set[int]) -> Finding | None:
    """The first call of a group that is not the same on all of its ranks."""
    lists: dict[tuple[str, tuple[int, ...]], dict[int, list[str]]] = {}
    for rank, lines in enumerate(calls):
        for line in lines:
            kind, name, members, *_ = line.split("\t")
            if kind not in ("send", "recv"):
                ranks = tuple(ast.literal_eval(members))
                lists.setdefault((name, ranks), {}).setdefault(rank, []).append(line)
    for (_, group), own in lists.items():
        # A rank that has done all the steps asked for is not seen any more.
        over = [len(own.get(rank, [])) for rank in group if rank in stopped]
        most = min([max(len(lines) for lines in own.values()), *over])
        for at in range(most):
            made = {rank: (own.get(rank, [])[at] if at < len(own.get(rank, [])) else None) for rank in group}
            if len({_key(line) for line in made.values()}) > 1:
                shown = "; ".join(f"rank {rank}: {_said(line)}" for rank, line in made.items())
                there = [line for line in made.values() if line is not None]
                others = [line for line in there if _key(line) != _key(there[0])]
                began = _place(others[0]) if others else None
                text = f"the ranks' calls differ, at call {at + 1} of the group: {shown}"
                return finding("GM401", text, _place(there[0]), began, group)
    return None


def _key(line: str | None) -> tuple[str, ...]:
    if line is None:
        return ("nothing",)
    kind, _, _, shapes, root, _ = line.split("\t")
    return (kind, shapes if kind in _SAME_SHAPES else "", root if kind == "broadcast" else "")


def _said(line: str | None) -> str:
    if line is None:
        return "no call"
    kind, _, _, shapes, _, place = line.split("\t")
    return f"{kind} of {shapes} at {place}"


def _place(line: str) -> Place | None:
    where = line.split("\t")[-1]
    file, _, number = where.rpartition(":")
    return _with_text(Place(file, int(number), "", "")) if number.isdigit() else None


def _with_text(at: Place | None) -> Place | None:
    if at is None:
        return None
    return Place(at.file, at.line, at.function, linecache.getline(at.file, at.line).strip())
