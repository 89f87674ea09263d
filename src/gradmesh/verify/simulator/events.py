"""What a simulation has seen: one event for each call of each rank, as a table and as rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, overload

__all__ = ["Event", "Events", "Phase"]

Phase = Literal["forward", "backward", "tangent"]


@dataclass(slots=True)
class Event:
    """One call of one rank that goes to other ranks. Times are seconds since the start of the run.

    Attributes:
        number: its place among the events of the run, in the order in which the calls were made.
        rank: the rank in the world.
        op: what travels: "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "gather",
            "scatter", "permute", "barrier", "send" or "recv".
        verb: the verb of gradmesh that made the call; "" for a call of torch.distributed.
        axis: the axis, or the axes joined with "+"; the name of the group where no axis is known.
        size: the number of ranks that take part.
        payload: bytes of the tensors that this rank hands in, in the dtype that travels.
        sent: bytes that this rank has to give to others; see `gradmesh.verify.simulator.counting`.
        phase: the pass that made it. What runs inside a backward pass is "backward": an adjoint, a hook's call, the
            recomputation of a checkpoint.
        line: the line of the program that made the call; in backward that is the line that asked for the gradient.
        origin: the number of the event whose backward or tangent this is, where that is known.
        of: the line of the forward call, where that is known.
        called: when the rank made the call.
        start: when it began to travel, as every rank was there and the link was free; None: it never did.
        end: when its result could be read; None: never.
        stood: when the rank began to wait for it; None: it never did.
        waited: how long it waited, in all.
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
        """Everything but the times: what is the same each time a seed comes back."""
        times = ("called", "start", "end", "stood", "waited")
        return tuple(getattr(self, name) for name in self.__slots__ if name not in times)


_HEADS = ("#", "rank", "call", "axis", "payload", "sent", "phase", "ms start", "ms end", "line")


class Events(Sequence[Event]):
    """The events of a run, in the order of the calls.

    `str` is a table of them, `rows` are dicts for a data frame, `select` finds some, `totals` adds them up.
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
        """Calls and bytes of all ranks by axis, op and phase, and the seconds that one rank's calls were under way."""
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
    """Columns of text, each as wide as it has to be."""
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
