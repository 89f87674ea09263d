"""The runs of a launcher: which function call of all ranks this process is in, and who has returned from which.

A launched rank goes on to live when its function has returned, and may be given the next one. So its process tells the
others nothing; it writes the number of the run that it has returned from into the memory of its groups, and a rank that
waits in the same run for something of it waits in vain.
"""

from __future__ import annotations

import weakref
from typing import Protocol

__all__ = ["Run", "run"]


class _Member(Protocol):
    """What one rank has under way in one group."""

    def run_over(self, failed: bool) -> None:
        """Tell the group that this rank's function is over."""


class Run:
    """The run that this process is in.

    Attributes:
        number: counted from 1, the same on every rank; 0 where no launcher counts.
        over: this rank's function is over.
        members: this process in each of its groups.
    """

    def __init__(self) -> None:
        self.number = 0
        self.over = False
        self.members: weakref.WeakSet[_Member] = weakref.WeakSet()

    @property
    def waits(self) -> int:
        """The number of the run that this rank is in the middle of, or 0."""
        return 0 if self.over else self.number

    def begin(self, number: int) -> None:
        """Say that a launcher has given this rank a function to run, in the run of that number."""
        self.number, self.over = number, False

    def end(self, *, failed: bool) -> None:
        """Say that the function is over, so that nobody waits for what this rank does not do any more."""
        self.over = True
        for member in list(self.members):
            member.run_over(failed)


run = Run()
