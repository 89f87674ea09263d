"""The links of a cost model: when a transfer starts and ends.

Each rank has a link for each axis, which carries one collective or message at a time. A collective starts when all its
ranks have called it and their links are free. Links of different axes are independent.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from gradmesh.verify.simulator.events import Event
from gradmesh.verify.simulator.model import CostModel

__all__ = ["Links"]


class Links:
    """The links of all ranks, and until when they are busy.

    Args:
        model: the cost of a call; None: 0.
    """

    def __init__(self, model: CostModel | None) -> None:
        self.model = model
        self._lock = threading.Lock()
        self._taken: dict[tuple[str, int], float] = {}

    def collective(self, events: Sequence[Event], now: float) -> float:
        """Set the times of a collective that all its ranks have called, and return its end (not before `now`)."""
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

    def message(self, event: Event) -> float:
        """Set the times of a message, and return its end."""
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
