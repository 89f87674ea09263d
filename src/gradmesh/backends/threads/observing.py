"""The interface with which a simulator observes, orders and delays the calls of thread ranks.

A world may have an `Observer`, which intercepts every call: it may let other ranks run first, record the call, and
delay its result. The base class does none of these.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradmesh.backends.threads.rendezvous import Contribution, Group, Receive, Rendezvous
    from gradmesh.backends.threads.waiting import Waitable

__all__ = ["Observer"]


class Observer:
    """Intercepts the calls of a world's ranks; each method is called in the rank's thread."""

    @property
    def lives(self) -> bool:
        """Whether results are delayed in wall-clock time, so that creating a future must not wait."""
        return False

    @property
    def takes_turns(self) -> bool:
        """Whether only the ranks' threads may communicate, one at a time, so that background threads cannot be used."""
        return False

    def async_axis(self, group: Group, run: Callable[[], None]) -> Callable[[], None]:
        """Run an asynchronous call if ranks take turns, as if it overlapped with the rank's computation.

        Args:
            group: the group of the call.
            run: runs the call.

        Returns:
            A function that waits for the call.
        """
        raise NotImplementedError

    def meet(
        self, group: Group, place: int, part: Contribution, kernel: Callable[[list[Contribution]], None]
    ) -> Rendezvous:
        """A rank makes its next call on a group.

        Args:
            group: the group.
            place: the rank in the group.
            part: its contribution.
            kernel: processes the contributions of all ranks, in the thread of the last one.
        """
        return group.bring(place, part, kernel)

    def send(self, group: Group, place: int, to: int, tag: int, part: Contribution) -> None:
        """A rank sends a message to group rank `to`."""
        group.hand(place, to, tag, part)

    def receive(self, group: Group, place: int, source: int | None, tag: int, part: Contribution) -> Receive:
        """A rank receives a message from group rank `source`, or from any rank (None)."""
        return group.take(place, source, tag, part)

    def wait(self, waits_for: Waitable, seconds: float) -> None:
        """A rank waits until something is complete, with a timeout."""
        if not waits_for.done:
            waits_for.sleep(seconds)

    def over(self, waits_for: Waitable) -> bool:
        """A rank polls whether something is complete."""
        return waits_for.done
