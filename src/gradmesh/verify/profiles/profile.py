"""`Profile`: the trace of torch's profiler on one or several ranks, and a table of the collectives."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from gradmesh.verify.joining import complete

__all__ = ["Entry", "Profile", "Row"]

Entry = dict[str, Any]

_RANGE = re.compile(
    r"gradmesh::(?P<verb>\S+) axis=(?P<axis>.*) bytes=(?P<bytes>\d+)(?P<backward> backward)?$"
)


class Row(NamedTuple):
    """The totals of a verb over an axis in one direction, over all ranks of the profile.

    Attributes:
        verb: the verb.
        axis: the axis.
        direction: "forward" or "backward".
        calls: the number of calls.
        bytes: the size of the operands.
        seconds: the total duration, including waiting for other ranks.
        longest: the longest duration.
    """

    verb: str
    axis: str
    direction: str
    calls: int
    bytes: int
    seconds: float
    longest: float


@dataclasses.dataclass
class Profile:
    """The profile of one or several ranks. It can be pickled, so that a rank can return it.

    Attributes:
        begun: the start time, in nanoseconds of the clock of rank 0; 0 until the block has ended.
        entries: the entries of a Chrome trace, with the rank as process id, in microseconds since the start time.
    """

    begun: int = 0
    entries: list[Entry] = dataclasses.field(default_factory=list)

    @classmethod
    def joined(cls, ranks: Iterable[Profile]) -> Profile:
        """Join the profiles of several ranks on one clock.

        Raises:
            ArgumentError: there are no profiles, or the block of one has not ended.
        """
        parts = complete(ranks, "Profile", "with profiled() as profile:")
        start = min(part.begun for part in parts)
        moved = [
            {**entry, "ts": entry["ts"] + (part.begun - start) / 1e3} if "ts" in entry else entry
            for part in parts
            for entry in part.entries
        ]
        return cls(start, moved)

    @property
    def rows(self) -> list[Row]:
        """The table: a row for each verb, axis and direction, by decreasing duration."""
        found: dict[tuple[str, str, str], list[tuple[int, float]]] = {}
        for entry in self.entries:
            name = _RANGE.match(entry.get("name", "")) if entry.get("ph") == "X" else None
            # On a GPU the range occurs a second time, with the duration of its kernels.
            if name is None or entry.get("cat") == "gpu_user_annotation":
                continue
            key = name["verb"], name["axis"], "backward" if name["backward"] else "forward"
            found.setdefault(key, []).append((int(name["bytes"]), entry["dur"] / 1e6))
        rows = [
            Row(
                *key, len(calls), sum(n for n, _ in calls), sum(t for _, t in calls), max(t for _, t in calls)
            )
            for key, calls in found.items()
        ]
        return sorted(rows, key=lambda row: -row.seconds)

    def __str__(self) -> str:
        """The table."""
        head = ("verb", "axis", "direction", "calls", "bytes", "ms", "us a call", "longest us")
        cells = [
            (
                *row[:3],
                str(row.calls),
                str(row.bytes),
                f"{1e3 * row.seconds:.2f}",
                f"{1e6 * row.seconds / row.calls:.0f}",
                f"{1e6 * row.longest:.0f}",
            )
            for row in self.rows
        ]
        widths = [max(map(len, column)) for column in zip(head, *cells, strict=True)]
        return "\n".join(
            "  ".join(
                cell.ljust(width) if place < 3 else cell.rjust(width)
                for place, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in (head, *cells)
        )

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the trace, which ui.perfetto.dev and chrome://tracing open: a process for each rank."""
        with open(path, "w") as file:
            json.dump({"traceEvents": self.entries, "displayTimeUnit": "ms"}, file)
