"""`timeline`: what a rank worked, began, sent and waited for; and the timelines of all ranks in one file."""

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
from gradmesh.verify.timelines.recorder import Noted, Passes, Recorder
from gradmesh.verify.timelines.work import worked

__all__ = ["Timeline", "timeline"]


@dataclasses.dataclass
class Timeline:
    """What ranks worked, began, sent and waited for; that of one rank, or of several.

    It can be pickled, so that a rank returns it; `joined` puts those of all ranks together.

    Attributes:
        begun: when it begins, by the clock of the machine (`time.perf_counter`).
        events: the calls of gradmesh that went to other ranks, with seconds since `begun`; as in a simulation, but that
            `start` is when this rank began to send.
        work: when a rank did not wait.
    """

    begun: float = 0.0
    events: Events = dataclasses.field(default_factory=lambda: Events([]))
    work: list[Work] = dataclasses.field(default_factory=list)

    @classmethod
    def joined(cls, ranks: Iterable[Timeline]) -> Timeline:
        """The timelines of ranks of one machine, whose clock is the same for all, as one.

        Raises:
            ArgumentError: there is none, or one that is not complete, as its block has not ended.
        """
        parts = complete(ranks, "Timeline", "with timeline() as line:")
        begun = min(part.begun for part in parts)
        events: list[Event] = []
        work: list[Work] = []
        for part in parts:
            later, before = part.begun - begun, len(events)
            events += [_moved(event, later, before) for event in part.events]
            work += [one._replace(start=one.start + later, end=one.end + later) for one in part.work]
        return cls(begun, Events(events), work)

    def __str__(self) -> str:
        """The table of events."""
        return str(self.events)

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write a trace file, which ui.perfetto.dev opens.

        Each rank has a row of its work and waits, a row for each axis with what is under way on it, and an arrow from
        each forward call to its backward. See `gradmesh.verify.simulator.trace`.
        """
        with open(path, "w") as file:
            json.dump(trace_of(self.events, self.work), file)

    def save_picture(self, path: str | os.PathLike[str], title: str = "") -> None:
        """Write the same as a picture, in the format that the name says (.png, .svg, .pdf).

        Args:
            path: the file.
            title: what stands above it.

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
                    remedy="pip install 'gradmesh[demo]', or save_trace and ui.perfetto.dev",
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
    """Note what the calling rank works, begins, sends and waits for in the block, on any backend.

    Every call of gradmesh that goes to other ranks is noted, with its bytes, its line, and the forward call whose
    gradient it is; also that which was begun with `async_op=True` and is made beside the work. Work is the time of
    the calling thread in which it waits for no such call. Calls of torch.distributed itself are not seen (see
    `simulate`, which sees them on threads), nor what a compiler may reorder.

    Yields:
        The `Timeline` of this rank, which is filled when the block ends.

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
        install_middleware(lambda transport: Noted(transport, recorder)),
        observe_waits(recorder.waited),
        Passes(recorder),
    ):
        yield found
    end, begun = time.perf_counter(), recorder.begun
    found.begun = begun
    found.events = Events([_moved(event, -begun, 0) for event in recorder.events])
    waits = [(stood - begun, went - begun) for stood, went in recorder.waits]
    passes = [(first - begun, last - begun) for first, last in recorder.passes]
    found.work = worked(recorder.rank, (0.0, end - begun), waits, passes)
