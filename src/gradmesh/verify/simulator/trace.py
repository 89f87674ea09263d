"""Events as a trace file, in the JSON format of Chrome's tracer, which Perfetto (ui.perfetto.dev) opens.

A process stands for each rank. Its first row shows when the rank waits, and what for, and where that is known also
when it works, and where it begins a call for which it does not wait. Each axis has a row with what is under way on it,
and more rows where things are under way at the same time. Arrows lead from a forward call to its backward and its
tangent.

The format: "Trace Event Format", Google, 2016. Times are microseconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from gradmesh.verify.simulator.events import Event

__all__ = ["Work", "trace_of"]

Entry = dict[str, Any]


class Work(NamedTuple):
    """A time in which a rank did not wait; in seconds, as those of the events."""

    rank: int
    phase: str
    start: float
    end: float


def trace_of(events: Iterable[Event], work: Iterable[Work] = ()) -> Entry:
    """The trace of a run, to be written with `json.dump`.

    Args:
        events: the calls.
        work: when the ranks worked, if that is known; of a rank it overlaps with nothing that the rank waits for.
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
                entries.append(_begun(what, event))
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


def _begun(what: str, event: Event) -> Entry:
    """A mark where a rank begins a call and goes on."""
    return {
        "ph": "i",
        "s": "t",
        "name": f"begins {what}",
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
    """The rows of each rank: slices of one row may not overlap."""

    def __init__(self, ranks: Iterable[int]) -> None:
        self._taken: dict[int, list[tuple[str, float]]] = {rank: [] for rank in ranks}

    def free(self, event: Event) -> int:
        """A row of the event's axis on which nothing is under way when it starts."""
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
