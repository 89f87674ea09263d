"""Writes events as a trace file in Chrome's JSON format, for Perfetto (ui.perfetto.dev).

Each rank is a process. Its first row shows waits and, if known, computation and launches of asynchronous calls. Each
axis has a row with its transfers, and additional rows for concurrent ones. Arrows connect a forward call with its
backward and its tangent.

The format: "Trace Event Format", Google, 2016. Times are microseconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from gradmesh.verify.simulator.events import Event

__all__ = ["Work", "trace_of"]

Entry = dict[str, Any]


class Work(NamedTuple):
    """An interval in which a rank computed, i.e. did not wait; in seconds, as for events."""

    rank: int
    phase: str
    start: float
    end: float


def trace_of(events: Iterable[Event], work: Iterable[Work] = ()) -> Entry:
    """The trace of a run, for `json.dump`.

    Args:
        events: the calls.
        work: the ranks' computation, if known; must not overlap with their waits.
    """
    working = list(work)
    rows = _Rows(one.rank for one in working)
    entries = [_working(one) for one in working]
    slices: dict[int, Entry] = {}
    for event in sorted(events, key=lambda event: (event.called, event.number)):
        what = _name(event)
        if event.stood is not None and event.waited > 0:
            entries.append(_slice(f"waits for {what}", event, 0, event.stood, event.stood + event.waited))
        if event.start is not None and event.end is not None:
            if working and event.stood != event.called:
                entries.append(_launch(what, event))
            row = rows.free(event)
            slices[event.number] = _slice(what, event, row, event.start, event.end)
            slices[event.number]["args"] = _arguments(event)
    entries += slices.values()
    for number, end in slices.items():
        origin = end["args"]["origin"]
        if origin in slices:
            entries += _arrow(number, slices[origin], end)
    return {
        "traceEvents": rows.names("work and waits" if working else "waits") + entries,
        "displayTimeUnit": "ms",
    }


def _name(event: Event) -> str:
    name = event.verb or event.op
    return name if event.phase == "forward" else f"{name} {event.phase}"


def _arguments(event: Event) -> Entry:
    names = ("axis", "size", "payload", "sent", "phase", "line", "of", "origin", "number")
    return {name: getattr(event, name) for name in names}


def _slice(name: str, event: Event, row: int, start: float, end: float) -> Entry:
    return {
        "ph": "X",
        "name": name,
        "cat": event.phase,
        "pid": event.rank,
        "tid": row,
        "ts": 1e6 * start,
        "dur": 1e6 * (end - start),
    }


def _working(work: Work) -> Entry:
    return {
        "ph": "X",
        "name": f"{work.phase} work",
        "cat": work.phase,
        "pid": work.rank,
        "tid": 0,
        "ts": 1e6 * work.start,
        "dur": 1e6 * (work.end - work.start),
    }


def _launch(what: str, event: Event) -> Entry:
    """A mark for the launch of an asynchronous call."""
    return {
        "ph": "i",
        "s": "t",
        "name": f"launches {what}",
        "cat": event.phase,
        "pid": event.rank,
        "tid": 0,
        "ts": 1e6 * event.called,
    }


def _arrow(number: int, start: Entry, end: Entry) -> list[Entry]:
    common = {"name": "gradient of", "cat": "flow", "id": number}
    return [
        {**common, "ph": "s", **{key: start[key] for key in ("pid", "tid", "ts")}},
        {**common, "ph": "f", "bp": "e", **{key: end[key] for key in ("pid", "tid", "ts")}},
    ]


class _Rows:
    """The rows of each rank; slices in a row must not overlap."""

    def __init__(self, ranks: Iterable[int]) -> None:
        self._taken: dict[int, list[tuple[str, float]]] = {rank: [] for rank in ranks}

    def free(self, event: Event) -> int:
        """A row of the event's axis that is free when it starts."""
        rows = self._taken.setdefault(event.rank, [])
        start, end = event.start or 0.0, event.end or 0.0
        for number, (axis, until) in enumerate(rows):
            if axis == event.axis and until <= start:
                rows[number] = axis, end
                return number + 1
        rows.append((event.axis, end))
        return len(rows)

    def names(self, first: str) -> list[Entry]:
        """The names of ranks and rows."""
        entries = []
        for rank, rows in sorted(self._taken.items()):
            entries.append(_metadata("process_name", rank, 0, f"rank {rank}"))
            entries.append(_metadata("thread_name", rank, 0, first))
            entries += [
                _metadata("thread_name", rank, row + 1, f"axis {axis}") for row, (axis, _) in enumerate(rows)
            ]
        return entries


def _metadata(kind: str, rank: int, row: int, name: str) -> Entry:
    return {"ph": "M", "name": kind, "pid": rank, "tid": row, "args": {"name": name}}
