"""The wire of a cost model: when a call begins to travel, and when its result can be read.

Each rank has a link for each axis, which carries one collective at a time, and messages one after another. A collective
begins when the last of its ranks has called it and the links of all of them are free. Links of different axes do not
hinder each other.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from gradmesh.verify.simulator.events import Event
from gradmesh.verify.simulator.model import CostModel

__all__ = ["Wire"]


class Wire:
    """The links of all ranks, and until when they are taken.

    Args:
        model: what a call costs; None: nothing.
    """

    def __init__(self, model: CostModel | None) -> None:
        self.model = model
        self._lock = threading.Lock()
        self._taken: dict[tuple[str, int], float] = {}

    def carry(self, events: Sequence[Event], now: float) -> float:
        """Enter the times of a collective that all its ranks have called, and return its end, at the earliest now."""
        ready = max(event.called for event in events)
        first = events[0]
        if self.model is None:
            start = end = ready
        else:
            seconds = self.model.seconds(
                first.op,
                first.axis,
                first.size,
                max(event.payload for event in events),
                max(event.sent for event in events),
            )
            start, end = self._book(first.axis, [event.rank for event in events], ready, seconds)
        end = max(end, now)
        for event in events:
            event.start, event.end = start, end
        return end

    def send(self, event: Event) -> float:
        """Enter the times of a message, and return its end."""
        if self.model is None:
            event.start = event.end = event.called
        else:
            seconds = self.model.seconds("send", event.axis, event.size, event.payload)
            event.start, event.end = self._book(event.axis, [event.rank], event.called, seconds)
        return event.end

    def _book(self, axis: str, ranks: Iterable[int], ready: float, seconds: float) -> tuple[float, float]:
        links = [(axis, rank) for rank in ranks]
        with self._lock:
            start = max(ready, *(self._taken.get(link, 0.0) for link in links))
            for link in links:
                self._taken[link] = start + seconds
        return start, start + seconds
