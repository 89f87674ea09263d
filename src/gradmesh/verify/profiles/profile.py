"""`Profile`: what torch's profiler saw on one rank or on all, as one trace and as a table of the collectives."""

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
    """A verb over an axis in one direction, on all ranks of the profile together.

    Attributes:
        verb: the verb.
        axis: the axis.
        direction: "forward" or "backward".
        calls: how many there were.
        bytes: what the ranks handed in.
        seconds: how long they took, those of all ranks added up; waiting for other ranks is in it.
        longest: the longest one.
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
    """What torch's profiler saw on a rank, or on several; it can be pickled, so that a rank returns it.

    Attributes:
        begun: when it begins: nanoseconds of the clock of rank 0; 0 as long as it is not complete.
        entries: the entries of a Chrome trace, with the rank as their process, in microseconds since `begun`.
    """

    begun: int = 0
    entries: list[Entry] = dataclasses.field(default_factory=list)

    @classmethod
    def joined(cls, ranks: Iterable[Profile]) -> Profile:
        """The profiles of ranks as one, on one clock.

        Raises:
            ArgumentError: there is none, or one that is not complete, as its block has not ended.
        """
        parts = complete(ranks, "Profile", "with profiled() as profile:")
        begun = min(part.begun for part in parts)
        moved = [
            {**entry, "ts": entry["ts"] + (part.begun - begun) / 1e3} if "ts" in entry else entry
            for part in parts
            for entry in part.entries
        ]
        return cls(begun, moved)

    @property
    def rows(self) -> list[Row]:
        """The table: a row for each verb, axis and direction, those that took longest first."""
        found: dict[tuple[str, str, str], list[tuple[int, float]]] = {}
        for entry in self.entries:
            name = _RANGE.match(entry.get("name", "")) if entry.get("ph") == "X" else None
            # On a GPU the same range is there a second time, as long as its kernels run.
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
