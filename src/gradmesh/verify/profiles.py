"""torch's profiler on every rank: one trace of all ranks on one clock, and a table of the collectives.

`gradmesh.verify.timeline` records transfers and waits; the profiler shows what each thread and device does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import platform
import re
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch.distributed as dist
from torch.profiler import profile

from gradmesh._torch import profiler_of_all_threads, profiler_on
from gradmesh.errors import ArgumentError
from gradmesh.transport.run import SEEN, own_rank
from gradmesh.verify.gradients.program import exchanged
from gradmesh.verify.simulator.trace import Entry, metadata, table
from gradmesh.verify.timelines import Record, complete

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
class Profile(Record):
    """The profile of one or several ranks. It can be pickled, so that a rank can return it.

    Attributes:
        started: the start time, in nanoseconds of the clock of rank 0; 0 until the block has ended. Its
            earlier name, `begun`, still works.
        entries: the entries of a Chrome trace, with the rank as process id, in microseconds since the start time.
    """

    entries: list[Entry] = dataclasses.field(default_factory=list)

    @classmethod
    def joined(cls, ranks: Iterable[Profile]) -> Profile:
        """Join the profiles of several ranks on one clock.

        Raises:
            ArgumentError: there are no profiles, or the block of one has not ended.
        """
        parts = complete(ranks, "Profile", "with profiled() as profile:")
        start = min(part.started for part in parts)
        moved = [
            {**entry, "ts": entry["ts"] + (part.started - start) / 1e3} if "ts" in entry else entry
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
        return table(head, cells, left=3)

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the trace, which ui.perfetto.dev and chrome://tracing open: a process for each rank."""
        with open(path, "w") as file:
            json.dump({"traceEvents": self.entries, "displayTimeUnit": "ms"}, file)


_ROUNDS = 9
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def now() -> int:
    """The host's time in nanoseconds, as in torch's traces."""
    return time.time_ns()


def machine() -> str:
    """An id of the host; ranks with the same id share a clock."""
    return f"{platform.node()} {_BOOT.read_text() if _BOOT.exists() else ''}"


def offset() -> int:
    """Nanoseconds by which this rank's clock is ahead of that of rank 0. Every rank must call this.

    Between hosts, all ranks read their clocks after each of several barriers, and the median difference counts. Its
    error is the time by which ranks leave a barrier at different times.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return 0
    machines = exchanged(machine())
    if len(set(machines)) == 1:
        return 0
    times = []
    for _ in range(_ROUNDS):
        dist.barrier()
        times.append(now())
    first = exchanged(times)[0]
    same_host = machine() == machines[0]
    return 0 if same_host else round(median(mine - theirs for mine, theirs in zip(times, first, strict=True)))


_DEVICES = 1_000_000
"""An offset that separates the process ids of devices from those of ranks."""


@dataclass
class _Part:
    """One rank's part of the profile of a process."""

    profile: Profile
    rank: int
    ahead: int
    thread: int
    begin: int
    end: int = 0


@dataclass
class _Session:
    """The profiler of a process, started by the first rank that enters and stopped by the last one that leaves."""

    profiler: profile = field(default_factory=profiler_of_all_threads)
    parts: list[_Part] = field(default_factory=list)
    inside: int = 0

    def distribute(self) -> None:
        """Give each rank its entries."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "trace.json")
            self.profiler.export_chrome_trace(str(path))
            trace = json.loads(path.read_text())
        base = int(trace.get("baseTimeNanoseconds", 0))
        ranks = SEEN | {part.thread: part.rank for part in self.parts}
        one_rank = len(set(ranks.values())) == 1
        for part in self.parts:
            begin, end = ((moment - base) / 1e3 for moment in (part.begin, part.end))
            taken = [
                entry
                for entry in trace["traceEvents"]
                if isinstance(entry.get("pid"), int)
                and (one_rank or ranks.get(entry.get("tid")) == part.rank)
                and begin <= entry.get("ts", begin) <= end
                and entry.get("ph") != "M"
            ]
            # The trace's metadata names the process, not its ranks: replace it.
            part.profile.entries = [*_names(part, taken), *(_of_rank(entry, part, begin) for entry in taken)]
            part.profile.started = part.begin - part.ahead


def _process(pid: int, rank: int) -> int:
    return rank if pid == os.getpid() else _DEVICES * (rank + 1) + pid


def _of_rank(entry: Entry, part: _Part, begin: float) -> Entry:
    made = {**entry, "pid": _process(entry["pid"], part.rank), "ts": entry["ts"] - begin}
    if "id" in entry:  # keep the arrows of different ranks apart
        made["id"] = f"{part.rank}.{entry['id']}"
    return made


def _names(part: _Part, taken: list[Entry]) -> list[Entry]:
    """The names of the rank's processes and threads."""
    found: list[Entry] = []
    for pid in sorted({entry["pid"] for entry in taken}):
        number, own = _process(pid, part.rank), pid == os.getpid()
        name = f"rank {part.rank}" if own else f"rank {part.rank}, device {pid}"
        found.append(metadata("process_name", number, 0, name=name))
        found.append(metadata("process_sort_index", number, 0, sort_index=2 * part.rank + (not own)))
    for thread in sorted({entry["tid"] for entry in taken if entry["pid"] == os.getpid()}):
        name = "the rank's thread" if thread == part.thread else f"thread {thread}"
        found.append(metadata("thread_name", part.rank, thread, name=name))
    return found


_lock = threading.Lock()
_running: list[_Session] = []


@contextlib.contextmanager
def profiled() -> Iterator[Profile]:
    """Profile the block on every rank with torch's profiler, for one trace of all ranks and one table.

    Every rank must enter the block; ranks on several hosts synchronize their clocks there. All threads of a process are
    profiled, including collectives with `async_op=True`, and thread ranks, which share one profiler.

    Yields:
        The `Profile` of this rank. It is filled when the block ends; on threads, when the last rank's block ends.

    Raises:
        ArgumentError: another profiler is running in this process.

    Example:
        >>> def on_each_rank():
        ...     x = torch.ones(3, requires_grad=True)
        ...     with gm.verify.profiled() as profile:
        ...         ((1 + gm.rank()) * gm.all_gather(x)).sum().backward()
        ...     return profile
        >>> profile = gm.verify.Profile.joined(gm.launch(on_each_rank, 2, backend="threads"))
        >>> sorted((row.verb, row.axis, row.direction, row.calls, row.bytes) for row in profile.rows)
        [('all_gather', 'world', 'forward', 2, 24), ('reduce_scatter', 'world', 'backward', 2, 48)]
        >>> profile.save_trace("/dev/null")  # a name that ends in .json
    """
    ahead = offset()
    with _lock:
        if not _running:
            if profiler_on():
                raise ArgumentError.of(
                    "another profiler is running",
                    op="profiled",
                    expected="no other profiler in this process, since torch supports only one",
                    got="a call inside of a torch.profiler.profile block",
                    remedy="remove the torch.profiler.profile block; Profile.save_trace('trace.json') writes the "
                    "same trace",
                )
            session = _Session()
            SEEN.clear()
            session.profiler.start()
            _running.append(session)
        session = _running[0]
        session.inside += 1
    part = _Part(Profile(), own_rank(), ahead, threading.get_native_id(), now())
    session.parts.append(part)
    try:
        yield part.profile
    finally:
        part.end = now()
        with _lock:
            session.inside -= 1
            if not session.inside:
                _running.clear()
                session.profiler.stop()
                session.distribute()
