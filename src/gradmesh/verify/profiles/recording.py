"""`profiled`: one profiler for the ranks of a process, split into a profile for each rank."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from torch.profiler import profile

from gradmesh._torch import profiler_of_all_threads, profiler_on
from gradmesh.errors import ArgumentError, message
from gradmesh.profiling import SEEN, own_rank
from gradmesh.verify.profiles.clocks import now, offset
from gradmesh.verify.profiles.profile import Entry, Profile

__all__ = ["profiled"]

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
            part.profile.begun = part.begin - part.ahead


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
        found.append(_metadata("process_name", number, 0, name=name))
        found.append(_metadata("process_sort_index", number, 0, sort_index=2 * part.rank + (not own)))
    for thread in sorted({entry["tid"] for entry in taken if entry["pid"] == os.getpid()}):
        name = "the rank's thread" if thread == part.thread else f"thread {thread}"
        found.append(_metadata("thread_name", part.rank, thread, name=name))
    return found


def _metadata(kind: str, pid: int, tid: int, **args: Any) -> Entry:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}


def _refuse() -> NoReturn:
    raise ArgumentError(
        message(
            "another profiler is running",
            op="profiled",
            expected="no other profiler in this process, since torch supports only one",
            got="a call inside of a torch.profiler.profile block",
            remedy="remove the torch.profiler.profile block; Profile.save_trace('trace.json') writes the same trace",
        )
    )


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
                _refuse()
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
