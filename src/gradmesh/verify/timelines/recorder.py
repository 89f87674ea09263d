"""What a rank notes while it is watched: its calls, its waits, and its backward passes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
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
from gradmesh.verify.timelines.through import Motion, Through
from gradmesh.verify.timelines.work import Span

__all__ = ["Noted", "Passes", "Recorder"]

T = TypeVar("T")

_STARTS = {torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad}


class Recorder:
    """The notes of one rank, whose thread is the one that makes this; times are those of `time.perf_counter`.

    Args:
        rank: the rank in the world.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.events: list[Event] = []
        self.passes: list[Span] = []
        self.waits: list[Span] = []
        self.begun = time.perf_counter()
        self._thread = threading.get_ident()
        self._lock = threading.Lock()
        self._marked = False
        self._made_by: dict[int, tuple[CallRecord, Event]] = {}
        self._made_beside: dict[int, Event] = {}

    def note(self, transport: Noted, motion: Motion, begin: float, end: float) -> None:
        """Note a motion that has been made."""
        recorded, job = transport.recorded, current_job()
        here = job is None and threading.get_ident() == self._thread
        phase: Phase = "backward" if in_backward() else "forward"
        origin = None if recorded is None else recorded.origin
        if recorded is not None and recorded.role:
            phase = "tangent" if recorded.role == TANGENT else "backward"
        event = Event(
            number=0,
            rank=self.rank,
            op=motion.op,
            verb=transport.verb,
            axis=transport.axis.name,
            size=transport.axis.size,
            payload=motion.payload,
            sent=round(motion.sent),
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
        """Note a wait for what was begun, if it is this thread that waited."""
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
        """A pass that nobody saw begin is as long as its calls."""
        if not in_pass:
            self._marked = False
        elif not self.passes or self.passes[-1][1] < begin:
            if self._marked:
                begin = self.passes.pop()[0]
            self.passes.append((begin, end))
            self._marked = True


class Noted(Through):
    """A transport whose motions are noted."""

    def __init__(self, inner: Transport, recorder: Recorder) -> None:
        super().__init__(inner)
        self._recorder = recorder
        self.verb = "" if self.call_check is None else self.call_check.verb
        self.recorded = None if self.call_check is None else self.call_check.recorded

    def through(self, motion: Motion, move: Callable[[], T]) -> T:
        """Make the motion, and note it."""
        begin = time.perf_counter()
        result = move()
        self._recorder.note(self, motion, begin, time.perf_counter())
        return result


class Passes(TorchFunctionMode):
    """Notes when backward passes of this thread begin and end."""

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
