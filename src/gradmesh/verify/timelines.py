"""Timelines of real runs: what each rank computes, launches, sends and waits for; and artificial network delays.

Both are instruments that wrap each transport, and receive the kind and size of each transfer. Names and sizes are those
of the simulator (`gradmesh.verify.simulator.trace`): `payload` is the size of this rank's input, `sent` the bytes that
it sends to others, independent of the algorithm. For a gather both are those of the rank with the longest part; for an
exchange with uneven parts those of this rank. Events and trace files are those of the simulator, too.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gradmesh._torch import in_backward
from gradmesh._util.call_sites import call_site
from gradmesh.errors import ArgumentError, MissingExtraError
from gradmesh.ops.transport import Counts, Transport
from gradmesh.runtime.state import Instrument, installed
from gradmesh.transport.comm_thread import WorkItem, current_job
from gradmesh.verify.simulator.costs import CostModel, Link
from gradmesh.verify.simulator.trace import Event, EventLog, Events, Work, show, trace_of

T = TypeVar("T")


@dataclasses.dataclass
class Record:
    """What one rank records, or several."""

    begun: float = 0

    @property
    def started(self) -> float:
        """The start time; `begun` is its earlier name."""
        return self.begun

    @started.setter
    def started(self, time: float) -> None:
        self.begun = time


def complete(ranks: Iterable[T], whole: str, block: str) -> list[T]:
    """Return the ranks' records as a list."""
    parts: list[Any] = list(ranks)
    if not parts or not all(part.started for part in parts):
        raise ArgumentError.of(
            "no complete records to join",
            op=f"{whole}.joined",
            expected=f"the object of `with {block} as record:` from each rank, after the block has ended",
            got=f"{len(parts)} records, {sum(not part.started for part in parts)} of them with an open block",
            remedy="return `record` from the function that each rank runs, after the with block",
        )
    return parts


class Transfer(NamedTuple):
    """A transfer: one primitive of a transport."""

    op: str  # its kind, as in an `Event` of the simulator
    payload: int  # the bytes of this rank's input
    sent: float  # the bytes that this rank sends to others


class Middleware(Transport):
    """A transport that delegates to another one."""

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner.axis, inner.call_check)
        self.inner = inner

    @abc.abstractmethod
    def through(self, transfer: Transfer, run: Callable[[], T]) -> T:
        """Run a transfer."""

    def exchange(
        self, flat: Tensor, send: Counts, receive: Counts, shape: Counts | None = None, *, even: bool = False
    ) -> Tensor:
        """Send the parts for others."""
        width = flat.itemsize
        transfer = Transfer("all_to_all", sum(send) * width, (sum(send) - send[self.axis.rank]) * width)
        return self.through(transfer, lambda: self.inner.exchange(flat, send, receive, shape, even=even))

    def gather(
        self, flat: Tensor, counts: Sequence[int], shape: Sequence[int] | None = None, *, even: bool = False
    ) -> Tensor:
        """Send the local part to each other rank."""
        local = max(counts) * flat.itemsize
        transfer = Transfer("all_gather", local, local * (self.axis.size - 1))
        return self.through(transfer, lambda: self.inner.gather(flat, counts, shape, even=even))

    def sum_and_scatter(
        self, flat: Tensor, counts: Sequence[int], shape: Sequence[int], *, even: bool = False
    ) -> Tensor:
        """Send the terms of the others' parts."""
        width = flat.itemsize
        transfer = Transfer("reduce_scatter", sum(counts) * width, (sum(counts) - min(counts)) * width)
        return self.through(transfer, lambda: self.inner.sum_and_scatter(flat, counts, shape, even=even))

    def sum(self, x: Tensor) -> Tensor:
        """Send the terms of the others' parts, and the local part of the result to each other rank."""
        return self.through(self._sum(x), lambda: self.inner.sum(x))

    def fold(self, x: Tensor, fold: Callable[[Tensor], Tensor]) -> Tensor:
        """Send as much as for a sum."""
        return self.through(self._sum(x), lambda: self.inner.fold(x, fold))

    def _sum(self, x: Tensor) -> Transfer:
        size = self.axis.size
        return Transfer("all_reduce", x.nbytes, 2 * x.nbytes * (size - 1) / size)

    def sum_at(self, x: Tensor, root: int) -> Tensor:
        """Send the operand, on every rank but the root."""
        transfer = Transfer("reduce", x.nbytes, 0 if self.axis.rank == root else x.nbytes)
        return self.through(transfer, lambda: self.inner.sum_at(x, root))

    def copy_from(self, x: Tensor, root: int) -> Tensor:
        """Send the operand to each other rank, at the root."""
        receivers = self.axis.size - 1 if self.axis.rank == root else 0
        transfer = Transfer("broadcast", x.nbytes, x.nbytes * receivers)
        return self.through(transfer, lambda: self.inner.copy_from(x, root))

    def relay(self, x: Tensor, to: int | None, source: int | None, shape: Sequence[int]) -> Tensor | None:
        """Send the operand, if it goes to another rank."""
        transfer = Transfer("permute", x.nbytes, 0 if to in (None, self.axis.rank) else x.nbytes)
        return self.through(transfer, lambda: self.inner.relay(x, to, source, shape))

    def compare(self) -> None:
        """Send nothing that counts."""
        self.through(Transfer("barrier", 0, 0), self.inner.compare)

    def post(self, x: Tensor, peer: int, greeting: str) -> None:
        """Send the message."""
        self.through(Transfer("send", x.nbytes, x.nbytes), lambda: self.inner.post(x, peer, greeting))

    def fetch(self, out: Tensor, peer: int, greeting: str) -> str | None:
        """The payload is the size of the received message."""
        transfer = Transfer("recv", out.nbytes, 0)
        return self.through(transfer, lambda: self.inner.fetch(out, peer, greeting))

    def withdraw_message(self, peer: int, said: str) -> None:
        """Not counted."""
        self.inner.withdraw_message(peer, said)

    def pass_over(self, peer: int) -> None:
        """Not counted."""
        self.inner.pass_over(peer)

    def withdraw(self, error: Exception) -> None:
        """Not counted."""
        self.inner.withdraw(error)


class _Delayed(Middleware):
    """A transport that delays each transfer to the time of a cost model."""

    def __init__(self, inner: Transport, model: CostModel) -> None:
        super().__init__(inner)
        self._model = model

    def through(self, transfer: Transfer, run: Callable[[], T]) -> T:
        """Run the transfer, and sleep for the rest of its modelled time."""
        op, payload, sent = transfer
        seconds = self._model.seconds(op, self.axis.name, self.axis.size, payload, sent)
        start = time.perf_counter()
        result = run()
        left = start + seconds - time.perf_counter()
        if left > 0 and op != "send":
            time.sleep(left)
        return result


class _Delays(Instrument):
    """Delays each call."""

    def __init__(self, model: CostModel) -> None:
        self._model = model

    def sending(self, transport: Transport) -> Transport:
        """Wrap the transport of a call."""
        return _Delayed(transport, self._model)


@contextlib.contextmanager
def delayed(wire: CostModel | Link) -> Iterator[None]:
    """Delay every gradmesh collective to at least the time that it would take on a given link, on any backend.

    After the transfer the rank sleeps for the rest of that time, in the transfer's thread and without holding the GIL,
    so that other threads continue: asynchronous calls (`async_op=True`) hide the delay like that of a real network.
    All ranks must pass the same model.

    The time counts on each rank from the start of its transfer. It is given by the `CostModel` for the bytes that this
    rank sends (see `gradmesh.verify.timelines`); a single `Link` means a model with the algorithm "direct".
    A point-to-point message is delayed at the receiver; `send` does not wait. Direct calls of torch.distributed, and
    calls that a compiler may reorder, are not delayed. In nested blocks the longer delay counts.

    Args:
        wire: the link of every axis, or a model with a link for each axis by name.

    Raises:
        ArgumentError: the model has no link for the axis of a call; raised by the call, on every rank.

    Example:
        >>> import time
        >>> def on_each_rank():
        ...     x = torch.ones(1_000_000)  # 4 MB, of which each rank keeps half
        ...     with gm.verify.delayed(gm.verify.Link(latency_us=500, gbytes_per_s=0.1)):
        ...         start = time.perf_counter()
        ...         gm.reduce_scatter(x)
        ...     return time.perf_counter() - start >= 0.0205
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [True, True]
    """
    model = CostModel(wire, "direct") if isinstance(wire, Link) else wire
    # Innermost, so that a timeline includes the delay whichever of the two was entered first.
    with installed(_Delays(model), innermost=True):
        yield


Span = tuple[float, float]
"""Start and end."""

_STARTS = {torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad}


class TimelineRecorder(Instrument):
    """The record of one rank, created on the rank's thread; times are from `time.perf_counter`."""

    def __init__(self, rank: int) -> None:
        self.rank, self.log = rank, EventLog()
        self.passes: list[Span] = []
        self.waits: list[Span] = []
        self.start = time.perf_counter()
        self._thread = threading.get_ident()
        self._marked = False
        self._made_beside: dict[int, Event] = {}

    def note(self, transport: RecordingTransport, transfer: Transfer, begin: float, end: float) -> None:
        """Record a completed transfer."""
        job, log = current_job(), self.log
        here = job is None and threading.get_ident() == self._thread
        with log.lock:
            event = log.add(
                transport.recorded,
                rank=self.rank,
                op=transfer.op,
                verb=transport.verb,
                axis=transport.axis.name,
                size=transport.axis.size,
                payload=transfer.payload,
                sent=round(transfer.sent),
                line=show(call_site()),
                called=begin if job is None else job.started,
                start=begin,
                end=end,
            )
            if job is not None:
                self._made_beside[id(job)] = event
        if here:
            self._stand(event, begin, end)

    def sending(self, transport: Transport) -> Transport:
        """Record the transfers of a call."""
        return RecordingTransport(transport, self)

    def waited(self, job: WorkItem[Any], begin: float, end: float) -> None:
        """Record a wait for an async call, if this thread waited."""
        if threading.get_ident() != self._thread:
            return
        with self.log.lock:
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
    """A transport that records each transfer."""

    def __init__(self, inner: Transport, recorder: TimelineRecorder) -> None:
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

    def __init__(self, recorder: TimelineRecorder) -> None:
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


@dataclasses.dataclass
class Timeline(Record):
    """What one or several ranks compute, launch, send and wait for.

    It can be pickled, so that a rank can return it; `joined` combines those of all ranks.

    Attributes:
        started: the start time, by the host's clock (`time.perf_counter`). Its earlier name,
            `begun`, still works.
        events: the communication calls of gradmesh, in seconds since the start time; as in a simulation, except that
            `start` is when this rank starts to send.
        work: the intervals in which a rank computes, i.e. does not wait.
    """

    events: Events = dataclasses.field(default_factory=lambda: Events([]))
    work: list[Work] = dataclasses.field(default_factory=list)

    @classmethod
    def joined(cls, ranks: Iterable[Timeline]) -> Timeline:
        """Join the timelines of ranks on one host, which share a clock.

        Raises:
            ArgumentError: there are no timelines, or the block of one has not ended.
        """
        parts = complete(ranks, "Timeline", "with timeline() as line:")
        start = min(part.started for part in parts)
        events: list[Event] = []
        work: list[Work] = []
        for part in parts:
            later, before = part.started - start, len(events)
            events += [_moved(event, later, before) for event in part.events]
            work += [one._replace(start=one.start + later, end=one.end + later) for one in part.work]
        return cls(start, Events(events), work)

    def __str__(self) -> str:
        """The table of events."""
        return str(self.events)

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write a trace file for ui.perfetto.dev.

        Each rank has a row with its computation and waits and a row of transfers for each axis; arrows connect each
        forward call with its backward. See `gradmesh.verify.simulator.trace`.
        """
        with open(path, "w") as file:
            json.dump(trace_of(self.events, self.work), file)

    def save_picture(self, path: str | os.PathLike[str], title: str = "") -> None:
        """Write the same as a picture, in the format given by the file's suffix (.png, .svg, .pdf).

        Args:
            path: the file.
            title: the title of the picture.

        Raises:
            MissingExtraError: matplotlib is not installed; `pip install 'gradmesh[demo]'`.
        """
        try:
            from gradmesh.verify.timeline_picture import drawn
        except ModuleNotFoundError as error:
            raise MissingExtraError.of(
                "an optional dependency is not installed",
                op="Timeline.save_picture",
                expected="matplotlib",
                got=str(error),
                remedy="run pip install 'gradmesh[demo]', or use save_trace('trace.json') and ui.perfetto.dev",
            ) from error
        drawn(self.events, self.work, title).savefig(path)


def _moved(event: Event, later: float, before: int) -> Event:
    def at(moment: float | None) -> float | None:
        return None if moment is None else moment + later

    return dataclasses.replace(
        event,
        number=event.number + before,
        origin=None if event.origin is None else event.origin + before,
        called=event.called + later,
        start=at(event.start),
        end=at(event.end),
        stood=at(event.stood),
    )


@contextlib.contextmanager
def timeline() -> Iterator[Timeline]:
    """Record what the calling rank computes, launches, sends and waits for in the block, on any backend.

    Every communication call of gradmesh is recorded, with its bytes, its line, and the forward call of a gradient;
    asynchronous calls (`async_op=True`) too. Computation is the time of the calling thread in which it does not wait
    for such a call. Direct calls of torch.distributed are not recorded (`simulate` records them, on threads), nor are
    calls that a compiler may reorder.

    Yields:
        The `Timeline` of this rank; it is filled when the block ends.

    Example:
        >>> def on_each_rank():
        ...     x = torch.full((3,), 1.0 + gm.rank(), requires_grad=True)
        ...     with gm.verify.timeline() as line:
        ...         gm.all_gather(x).square().sum().backward()
        ...     return line
        >>> line = gm.verify.Timeline.joined(gm.launch(on_each_rank, 2, backend="threads"))
        >>> [(e.rank, e.verb, e.phase, e.sent, e.origin) for e in line.events]
        ... # doctest: +NORMALIZE_WHITESPACE
        [(0, 'all_gather', 'forward', 12, None), (0, 'reduce_scatter', 'backward', 12, 0),
         (1, 'all_gather', 'forward', 12, None), (1, 'reduce_scatter', 'backward', 12, 2)]
        >>> line.save_trace("/dev/null")  # a name that ends in .json
    """
    found = Timeline()
    recorder = TimelineRecorder(dist.get_rank() if dist.is_initialized() else 0)
    with installed(recorder), Passes(recorder):
        yield found
    end, start = time.perf_counter(), recorder.start
    found.started = start
    found.events = Events([_moved(event, -start, 0) for event in recorder.log.events])
    waits = [(stood - start, went - start) for stood, went in recorder.waits]
    passes = [(first - start, last - start) for first, last in recorder.passes]
    found.work = worked(recorder.rank, (0.0, end - start), waits, passes)
