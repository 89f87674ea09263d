"""The runs of a launcher: which run this process is in, and which ranks have returned from it.

A launched process stays alive after its function has returned, to run the next one. So it writes the number of the run
that it has returned from into the shared memory of its groups, which ends the wait of other ranks in the same run.
"""

from __future__ import annotations

import weakref
from typing import Protocol

__all__ = ["Run", "run"]


class _Member(Protocol):
    """A rank's engine in one group."""

    def run_over(self, failed: bool) -> None:
        """Publish that this rank's function has returned or failed."""


class Run:
    """The run that this process is in.

    Attributes:
        number: its number from 1, the same on every rank; 0 without a launcher.
        over: whether this rank's function has returned.
        members: this process's engine in each of its groups.
    """

    def __init__(self) -> None:
        self.number = 0
        self.over = False
        self.members: weakref.WeakSet[_Member] = weakref.WeakSet()

    @property
    def waits(self) -> int:
        """The number of the current run, or 0 if the function has returned."""
        return 0 if self.over else self.number

    def begin(self, number: int) -> None:
        """Start the run of that number."""
        self.number, self.over = number, False

    def end(self, *, failed: bool) -> None:
        """End the run, so that other ranks stop waiting for this one."""
        self.over = True
        for member in list(self.members):
            member.run_over(failed)


run = Run()
