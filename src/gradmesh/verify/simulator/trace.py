"""Events of a simulation or a real run: one for each call of each rank, and their trace file.

The file is in Chrome's JSON format, for Perfetto (ui.perfetto.dev). Each rank is a process. Its first row shows waits
and, if known, computation and launches of asynchronous calls. Each axis has a row with its transfers, and additional
rows for concurrent ones. Arrows connect a forward call with its backward and its tangent.

The format: "Trace Event Format", Google, 2016. Times are microseconds.

Input and sent bytes of a collective on a rank.
`payload` is the size of the rank's input tensors in the dtype that is sent; for `broadcast` the buffer of every rank.

`sent` does not depend on the algorithm. It is the data of this rank that other ranks receive, counted once for each of
them: for `all_gather` the local shard times W - 1, for `broadcast` the tensor times W - 1 at the root and 0 elsewhere,
for `all_to_all` the parts for other ranks. For reductions it is the terms of other ranks' sums: for `reduce_scatter`
the parts for other ranks, for `reduce` the tensor on every rank but the root. `all_reduce` counts as a reduce_scatter
with the balanced split, then an all_gather: 2 (W - 1) / W of the tensor if W divides its size. In total, ranks send as
much as must be received; a real algorithm may send more, and less on a single rank.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, overload

import torch

from gradmesh._torch import in_backward
from gradmesh._util.call_sites import Site
from gradmesh.backends.threads.rendezvous import Contribution, Group
from gradmesh.transport.call_checks import TANGENT, CallRecord, OpCallCheck

Phase = Literal["forward", "backward", "tangent"]


@dataclass(slots=True)
class Event:
    """One communication call of one rank. Times are seconds since the start of the run.

    Attributes:
        number: its index among the events of the run, in the order of the calls.
        rank: the rank in the world.
        op: the kind of transfer: "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce",
            "gather", "scatter", "permute", "barrier", "send" or "recv".
        verb: the gradmesh verb that made the call; "" for a call of torch.distributed.
        axis: the axis, or several axes joined with "+"; the name of the group if the axis is unknown.
        size: the number of participating ranks.
        payload: the bytes of this rank's input tensors, in the dtype that is sent.
        sent: the bytes that this rank sends to others; see the top of this file.
        phase: "forward", "backward" or "tangent". Everything inside a backward pass is "backward": adjoints, calls in
            hooks, recomputation of a checkpoint.
        line: the line of the program that made the call; in backward the line that called backward.
        origin: the number of the event whose backward or tangent this is, if known.
        of: the line of the forward call, if known.
        called: when the rank made the call.
        start: when the transfer started: all ranks had made the call and the link was free; None: never.
        end: when the result was available; None: never.
        stood: when the rank started to wait for it; None: it did not wait.
        waited: the total time that it waited.
    """

    number: int
    rank: int
    op: str
    verb: str
    axis: str
    size: int
    payload: int
    sent: int
    phase: Phase
    line: str
    origin: int | None
    of: str
    called: float
    start: float | None = None
    end: float | None = None
    stood: float | None = None
    waited: float = 0.0

    def row(self) -> dict[str, object]:
        """The attributes by name."""
        return {name: getattr(self, name) for name in self.__slots__}

    @property
    def what(self) -> tuple[object, ...]:
        """Everything but the times; reproducible with the same seed."""
        times = ("called", "start", "end", "stood", "waited")
        return tuple(getattr(self, name) for name in self.__slots__ if name not in times)


_HEADS = ("#", "rank", "call", "axis", "payload", "sent", "phase", "ms start", "ms end", "line")


class Events(Sequence[Event]):
    """The events of a run, in the order of the calls.

    `str` returns a table, `rows` dicts for a data frame, `select` filters, `totals` sums.
    """

    def __init__(self, events: Sequence[Event]) -> None:
        self._events = list(events)

    @overload
    def __getitem__(self, index: int) -> Event: ...

    @overload
    def __getitem__(self, index: slice) -> Events: ...

    def __getitem__(self, index: int | slice) -> Event | Events:
        """An event, or some of them."""
        return Events(self._events[index]) if isinstance(index, slice) else self._events[index]

    def __len__(self) -> int:
        return len(self._events)

    def __iter__(self) -> Iterator[Event]:
        return iter(self._events)

    def select(self, **wanted: object) -> Events:
        """The events with these attributes: `events.select(rank=0, phase="backward")`."""
        return Events([e for e in self._events if all(getattr(e, k) == v for k, v in wanted.items())])

    def rows(self) -> list[dict[str, object]]:
        """Every event as a dict."""
        return [event.row() for event in self._events]

    def totals(self) -> list[dict[str, object]]:
        """Calls and bytes of all ranks by axis, op and phase, and the largest total transfer time of a rank."""
        found: dict[tuple[str, str, str], list[Event]] = {}
        for event in self._events:
            found.setdefault((event.axis, event.op, event.phase), []).append(event)
        rows: list[dict[str, object]] = []
        for (axis, op, phase), events in found.items():
            seconds: dict[int, float] = {}
            for event in events:
                took = 0.0 if event.start is None or event.end is None else event.end - event.start
                seconds[event.rank] = seconds.get(event.rank, 0.0) + took
            rows.append(
                {
                    "axis": axis,
                    "op": op,
                    "phase": phase,
                    "calls": len(events),
                    "payload": sum(event.payload for event in events),
                    "sent": sum(event.sent for event in events),
                    "seconds": max(seconds.values()),
                }
            )
        return rows

    def __str__(self) -> str:
        return table(_HEADS, [_cells(event) for event in self._events])


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], left: int | None = None) -> str:
    """A text table with aligned columns; those after the first `left` ones are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if left is None or place < left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in (heads, *rows)
    )


def _cells(event: Event) -> list[str]:
    def ms(time: float | None) -> str:
        return "-" if time is None else f"{1000 * time:.3f}"

    line = f"{event.line}, of {event.of}" if event.of else event.line
    return [
        *map(str, (event.number, event.rank, event.verb or event.op, event.axis)),
        *map(str, (event.payload, event.sent, event.phase, ms(event.start), ms(event.end), line)),
    ]


Entry = dict[str, Any]


class Work(NamedTuple):
    """An interval in which a rank computed, i.e. did not wait; in seconds, as for events."""

    rank: int
    phase: str
    start: float
    end: float


def trace_of(events: Iterable[Event], work: Iterable[Work] = ()) -> Entry:
    """The trace of a run, for `json.dump`; work must not overlap with waits."""
    working = list(work)
    rows = _Rows(one.rank for one in working)
    entries = [_slice(f"{one.phase} work", one, 0, one.start, one.end) for one in working]
    slices: dict[int, Entry] = {}
    for event in sorted(events, key=lambda event: (event.called, event.number)):
        what = _name(event)
        if event.stood is not None and event.waited > 0:
            entries.append(_slice(f"waits for {what}", event, 0, event.stood, event.stood + event.waited))
        if event.start is not None and event.end is not None:
            if working and event.stood != event.called:
                entries.append(
                    {
                        "ph": "i",
                        "s": "t",
                        "name": f"launches {what}",
                        "cat": event.phase,
                        "pid": event.rank,
                        "tid": 0,
                        "ts": 1e6 * event.called,
                    }
                )
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


def _slice(name: str, of: Event | Work, row: int, start: float, end: float) -> Entry:
    return {
        "ph": "X",
        "name": name,
        "cat": of.phase,
        "pid": of.rank,
        "tid": row,
        "ts": 1e6 * start,
        "dur": 1e6 * (end - start),
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
            entries.append(metadata("process_name", rank, 0, name=f"rank {rank}"))
            entries.append(metadata("thread_name", rank, 0, name=first))
            entries += [
                metadata("thread_name", rank, row + 1, name=f"axis {axis}")
                for row, (axis, _) in enumerate(rows)
            ]
        return entries


def metadata(kind: str, process: int, thread: int, **args: Any) -> Entry:
    """An entry that names a process or a thread of the trace."""
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": args}


class EventLog:
    """The events of a run, each with the event whose backward or tangent it is."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.lock = threading.Lock()
        self._made_by: dict[int, tuple[CallRecord, Event]] = {}

    def add(self, recorded: CallRecord | None, **fields: Any) -> Event:
        """Add the event of a transfer; the caller holds the lock."""
        phase: Phase = "backward" if in_backward() else "forward"
        origin: CallRecord | None = None
        if recorded is not None:
            origin = recorded.origin
            if recorded.role:
                phase = "tangent" if recorded.role == TANGENT else "backward"
        made_by = None if origin is None else self._made_by.get(id(origin))
        event = Event(
            number=len(self.events),
            phase=phase,
            origin=None if made_by is None else made_by[1].number,
            of="" if origin is None else show(origin.site),
            **fields,
        )
        if recorded is not None:  # of a call's transfers the first
            self._made_by.setdefault(id(recorded), (recorded, event))
        self.events.append(event)
        return event


class Notes(EventLog):
    """The events of all ranks of a world."""

    def __init__(self, mesh: Mapping[str, int]) -> None:
        super().__init__()
        self._mesh = dict(mesh)
        self._axes: dict[Group, str] = {}
        self._last: dict[tuple[Group, int], tuple[OpCallCheck, Site]] = {}

    def note(self, group: Group, place: int, part: Contribution, now: float) -> Event:
        """Create the event of a call."""
        with self.lock:
            check = self._call_check(group, place, part)
            if group not in self._axes:
                self._axes[group] = self._name(group)
            return self.add(
                None if check is None else check.recorded,
                rank=group.ranks[place],
                op=op_of(part),
                verb="" if check is None else check.verb,
                axis=self._axes[group],
                size=len(group.ranks),
                payload=bytes_of(part.inputs),
                sent=sent_by(place, part, len(group.ranks)),
                line=show(part.site),
                called=now,
            )

    def _call_check(self, group: Group, place: int, part: Contribution) -> OpCallCheck | None:
        """The verb's call check.

        A verb may need several transfers; only the first has a call check, and the others have the same call site.
        """
        key = group, place
        if isinstance(part.call_check, OpCallCheck):
            self._last[key] = part.call_check, part.site
            return part.call_check
        last = self._last.get(key)
        if last is not None and part.direct and last[1] == part.site:
            return last[0]
        self._last.pop(key, None)
        return None

    def _name(self, group: Group) -> str:
        along = axes_of(group.ranks, self._mesh)
        if along:
            return "+".join(along)
        if group.purpose.startswith("mesh_") and group.purpose != "mesh_default":
            return group.purpose.removeprefix("mesh_")
        return "world" if len(group.ranks) == group.world.size else group.name


def axes_of(ranks: list[int], mesh: Mapping[str, int]) -> list[str]:
    """The axes of a mesh along which the ranks differ.

    >>> axes_of([0, 8], {"outer": 2, "inner": 8}), axes_of([1, 3], {"outer": 2, "inner": 8})
    (['outer'], ['inner'])
    """
    found, stride = [], 1
    for name, size in reversed(list(mesh.items())):
        if len({rank // stride % size for rank in ranks}) > 1:
            found.append(name)
        stride *= size
    return found[::-1]


def show(site: Site) -> str:
    """A call site as text; files below the current directory with their relative path."""
    if site is None:
        return "an unknown line"
    file, here = site[0].co_filename, os.getcwd() + os.sep
    return f"{file.removeprefix(here)}:{site[1]} in {site[0].co_name}"


_OPS = {
    *("all_reduce", "reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "gather", "scatter"),
    *("permute", "barrier", "send", "recv"),
}


def op_of(part: Contribution) -> str:
    """The kind of transfer; "withdrawn" for a call that the rank aborted."""
    called = part.call.partition("(")[0].removesuffix("_single")
    op = "permute" if called == "relay" else called
    return op if op in _OPS else "withdrawn"


def bytes_of(tensors: Iterable[torch.Tensor | None]) -> int:
    """The size of the tensors; for sparse ones that of their values and indices."""
    return sum(_bytes(tensor) for tensor in tensors if tensor is not None)


def _bytes(tensor: torch.Tensor) -> int:
    if tensor.layout is not torch.strided:
        tensor = tensor.detach().coalesce()
        return bytes_of([tensor.values(), tensor.indices()])
    return tensor.numel() * tensor.itemsize


def sent_by(place: int, part: Contribution, size: int) -> int:
    """The bytes that a rank sends to others."""
    op, pieces = op_of(part), part.pieces
    if op == "all_reduce":
        return sum(_sum_everywhere(tensor, place, size) for tensor in part.inputs)
    if op == "reduce":
        root = int(part.call.rpartition("root ")[2].rstrip(")"))
        return 0 if place == root else bytes_of(part.inputs)
    if op == "permute":
        return 0 if pieces == place else bytes_of(part.inputs)
    if op == "send":
        return bytes_of(part.inputs)
    if isinstance(pieces, Sequence):
        return bytes_of(x for batch in pieces for target, x in enumerate(batch.give) if target != place)
    return 0


def _sum_everywhere(tensor: torch.Tensor, place: int, size: int) -> int:
    if tensor.layout is not torch.strided:
        return (size - 1) * _bytes(tensor)  # the ranks' indices differ, so all values are gathered
    share, more = divmod(tensor.numel(), size)
    local = share + (place < more)
    return (tensor.numel() - local + (size - 1) * local) * tensor.itemsize
