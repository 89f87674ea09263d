"""Records the calls, waits and backward passes of a rank, and derives its computation from them."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch.overrides import TorchFunctionMode

from gradmesh._torch import in_backward
from gradmesh.call_sites import call_site
from gradmesh.transport import Transport
from gradmesh.transport.call_checks import TANGENT, CallRecord
from gradmesh.transport.comm_thread import WorkItem, current_job
from gradmesh.verify.simulator.events import Event, Phase
from gradmesh.verify.simulator.notes import show
from gradmesh.verify.simulator.trace import Work
from gradmesh.verify.timelines.middleware import Middleware, Transfer

__all__ = ["Passes", "Recorder", "RecordingTransport", "worked"]

T = TypeVar("T")

Span = tuple[float, float]
"""Start and end."""

_STARTS = {torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad}


class Recorder:
    """The record of one rank, created on the rank's thread; times are from `time.perf_counter`.

    Args:
        rank: the rank in the world.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.events: list[Event] = []
        self.passes: list[Span] = []
        self.waits: list[Span] = []
        self.start = time.perf_counter()
        self._thread = threading.get_ident()
        self._lock = threading.Lock()
        self._marked = False
        self._made_by: dict[int, tuple[CallRecord, Event]] = {}
        self._made_beside: dict[int, Event] = {}

    def note(self, transport: RecordingTransport, transfer: Transfer, begin: float, end: float) -> None:
        """Record a completed transfer."""
        recorded, job = transport.recorded, current_job()
        here = job is None and threading.get_ident() == self._thread
        phase: Phase = "backward" if in_backward() else "forward"
        origin = None if recorded is None else recorded.origin
        if recorded is not None and recorded.role:
            phase = "tangent" if recorded.role == TANGENT else "backward"
        event = Event(
            number=0,
            rank=self.rank,
            op=transfer.op,
            verb=transport.verb,
            axis=transport.axis.name,
            size=transport.axis.size,
            payload=transfer.payload,
            sent=round(transfer.sent),
            phase=phase,
            line=show(call_site()),
            origin=None,
            of="" if origin is None else show(origin.site),
            called=begin if job is None else job.started,
            start=begin,
            end=end,
        )
        with self._lock:
            event.number = len(self.events)
            self.events.append(event)
            if origin is not None and (made := self._made_by.get(id(origin))) is not None:
                event.origin = made[1].number
            if recorded is not None:
                self._made_by.setdefault(id(recorded), (recorded, event))
            if job is not None:
                self._made_beside[id(job)] = event
        if here:
            self._stand(event, begin, end)

    def waited(self, job: WorkItem[Any], begin: float, end: float) -> None:
        """Record a wait for an async call, if this thread waited."""
        if threading.get_ident() != self._thread:
            return
        with self._lock:
            event = self._made_beside.pop(id(job), None)
        self._stand(event, begin, end)

    def _stand(self, event: Event | None, begin: float, end: float) -> None:
        if event is not None:
            event.stood, event.waited = begin, end - begin
        self.waits.append((begin, end))
        self._mark(in_backward(), begin, end)

    def _mark(self, in_pass: bool, begin: float, end: float) -> None:
        """Extend the current backward pass; a pass whose start was not seen spans its calls."""
        if not in_pass:
            self._marked = False
        elif not self.passes or self.passes[-1][1] < begin:
            if self._marked:
                begin = self.passes.pop()[0]
            self.passes.append((begin, end))
            self._marked = True


class RecordingTransport(Middleware):
    """Middleware that records each transfer."""

    def __init__(self, inner: Transport, recorder: Recorder) -> None:
        super().__init__(inner)
        self._recorder = recorder
        self.verb = "" if self.call_check is None else self.call_check.verb
        self.recorded = None if self.call_check is None else self.call_check.recorded

    def through(self, transfer: Transfer, run: Callable[[], T]) -> T:
        """Run the transfer and record it."""
        begin = time.perf_counter()
        result = run()
        self._recorder.note(self, transfer, begin, time.perf_counter())
        return result


class Passes(TorchFunctionMode):
    """Records the start and end of this thread's backward passes."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func not in _STARTS:
            return func(*args, **(kwargs or {}))
        passes, begin = self._recorder.passes, time.perf_counter()
        passes.append((begin, float("inf")))
        try:
            return func(*args, **(kwargs or {}))
        finally:
            passes[-1] = begin, time.perf_counter()


def worked(rank: int, whole: Span, waits: Iterable[Span], passes: Sequence[Span]) -> list[Work]:
    """The intervals in which a rank did not wait, split at the start and end of backward passes.

    Args:
        rank: the rank.
        whole: the recorded interval.
        waits: its waits.
        passes: its backward passes, which must not overlap.

    >>> [(w.phase, w.start, w.end) for w in worked(0, (0, 9), [(2, 3), (5, 6)], [(4, 8)])]
    [('forward', 0, 2), ('forward', 3, 4), ('backward', 4, 5), ('backward', 6, 8), ('forward', 8, 9)]
    """
    begin, end = whole
    edges = sorted({begin, end, *(edge for one in passes for edge in one if begin < edge < end)})
    found = []
    standing = sorted(waits)
    for left, right in itertools.pairwise(edges):
        phase = "backward" if any(first <= left and right <= last for first, last in passes) else "forward"
        at = left
        for stood, went in standing:
            if went > at and stood < right:
                if stood > at:
                    found.append(Work(rank, phase, at, stood))
                at = went
        if at < right:
            found.append(Work(rank, phase, at, right))
    return found
