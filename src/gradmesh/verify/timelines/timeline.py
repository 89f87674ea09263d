"""`timeline`: what a rank computes, launches, sends and waits for; and the timelines of all ranks in one file."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Iterable, Iterator

import torch.distributed as dist

from gradmesh.errors import MissingExtraError, message
from gradmesh.transport import install_middleware
from gradmesh.transport.middleware import observe_waits
from gradmesh.verify.joining import complete
from gradmesh.verify.simulator.events import Event, Events
from gradmesh.verify.simulator.trace import Work, trace_of
from gradmesh.verify.timelines.recorder import Passes, Recorder, RecordingTransport, worked

__all__ = ["Timeline", "timeline"]


@dataclasses.dataclass
class Timeline:
    """What one or several ranks compute, launch, send and wait for.

    It can be pickled, so that a rank can return it; `joined` combines those of all ranks.

    Attributes:
        begun: the start time, by the host's clock (`time.perf_counter`).
        events: the communication calls of gradmesh, in seconds since the start time; as in a simulation, except that
            `start` is when this rank starts to send.
        work: the intervals in which a rank computes, i.e. does not wait.
    """

    begun: float = 0.0
    events: Events = dataclasses.field(default_factory=lambda: Events([]))
    work: list[Work] = dataclasses.field(default_factory=list)

    @classmethod
    def joined(cls, ranks: Iterable[Timeline]) -> Timeline:
        """Join the timelines of ranks on one host, which share a clock.

        Raises:
            ArgumentError: there are no timelines, or the block of one has not ended.
        """
        parts = complete(ranks, "Timeline", "with timeline() as line:")
        start = min(part.begun for part in parts)
        events: list[Event] = []
        work: list[Work] = []
        for part in parts:
            later, before = part.begun - start, len(events)
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
            from gradmesh.verify.timelines.picture import draw
        except ModuleNotFoundError as error:
            raise MissingExtraError(
                message(
                    "an optional dependency is not installed",
                    op="Timeline.save_picture",
                    expected="matplotlib",
                    got=str(error),
                    remedy="run pip install 'gradmesh[demo]', or use save_trace('trace.json') and ui.perfetto.dev",
                )
            ) from error
        draw(self.events, self.work, path, title)


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
    recorder = Recorder(dist.get_rank() if dist.is_initialized() else 0)
    with (
        install_middleware(lambda transport: RecordingTransport(transport, recorder)),
        observe_waits(recorder.waited),
        Passes(recorder),
    ):
        yield found
    end, start = time.perf_counter(), recorder.start
    found.begun = start
    found.events = Events([_moved(event, -start, 0) for event in recorder.events])
    waits = [(stood - start, went - start) for stood, went in recorder.waits]
    passes = [(first - start, last - start) for first, last in recorder.passes]
    found.work = worked(recorder.rank, (0.0, end - start), waits, passes)
