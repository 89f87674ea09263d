"""The seam at which a simulator watches, orders and delays what ranks that are threads do.

A world has an `Observer`, or None. Where it has one, each call of a rank goes through it: it may let other ranks go on
first, note the call, and hold its result back. What is here does nothing of that; an observer overrides what it needs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradmesh.backends.threads.rendezvous import Contribution, Group, Receive, Rendezvous
    from gradmesh.backends.threads.waiting import Waitable

__all__ = ["Observer"]


class Observer:
    """Stands between the ranks of a world and what they call; each method is called in the rank's thread."""

    @property
    def lives(self) -> bool:
        """Whether results are held back in real time, so that a future must not be waited for when it is made."""
        return False

    @property
    def takes_turns(self) -> bool:
        """Whether only the ranks' own threads may call, one at a time, so that nothing can be done beside them."""
        return False

    def async_axis(self, group: Group, run: Callable[[], None]) -> Callable[[], None]:
        """Run what a rank has begun, where ranks take turns, as if it were done beside what the rank does.

        Args:
            group: the group on which it calls.
            run: does it.

        Returns:
            What the rank calls to wait for it.
        """
        raise NotImplementedError

    def meet(
        self, group: Group, place: int, part: Contribution, kernel: Callable[[list[Contribution]], None]
    ) -> Rendezvous:
        """A rank brings its part to the next call of a group.

        Args:
            group: the group.
            place: the rank in the group.
            part: what it brings.
            kernel: what is done with the parts of all ranks, in the thread of the one that comes last.
        """
        return group.bring(place, part, kernel)

    def send(self, group: Group, place: int, to: int, tag: int, part: Contribution) -> None:
        """A rank sends a message to the rank at place `to`."""
        group.hand(place, to, tag, part)

    def receive(self, group: Group, place: int, source: int | None, tag: int, part: Contribution) -> Receive:
        """A rank asks for the message of the rank at place `source`, or of anybody."""
        return group.take(place, source, tag, part)

    def wait(self, waits_for: Waitable, seconds: float) -> None:
        """A rank waits until something is complete, at most so long."""
        if not waits_for.done:
            waits_for.sleep(seconds)

    def over(self, waits_for: Waitable) -> bool:
        """A rank asks whether something is complete."""
        return waits_for.done
