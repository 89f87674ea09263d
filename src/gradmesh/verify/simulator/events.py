"""The events of a simulation: one for each call of each rank, as a table and as rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, overload

__all__ = ["Event", "Events", "Phase"]

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
        sent: the bytes that this rank sends to others; see `gradmesh.verify.simulator.counting`.
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


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A text table with aligned columns."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    lines = [heads, *rows]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def _cells(event: Event) -> list[str]:
    def ms(time: float | None) -> str:
        return "-" if time is None else f"{1000 * time:.3f}"

    line = f"{event.line}, of {event.of}" if event.of else event.line
    return [
        *map(str, (event.number, event.rank, event.verb or event.op, event.axis)),
        *map(str, (event.payload, event.sent, event.phase, ms(event.start), ms(event.end), line)),
    ]
