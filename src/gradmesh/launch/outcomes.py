"""How a run of a function on all ranks ended, the same for ranks that are processes or threads."""

from __future__ import annotations

import dataclasses
import datetime
import os
import re
import threading
import time
import traceback
from types import TracebackType

from gradmesh.errors import AbortedError, RankError, message

__all__ = ["FAILURE_GRACE", "POLL", "START_LIMIT", "Failure", "Outcome", "group_timeout"]

FAILURE_GRACE = 0.5
"""Seconds that the other ranks get after the first failure, to tell theirs."""
START_LIMIT = 300.0
"""Seconds for the ranks to start and find each other."""
POLL = 0.2
"""Seconds between two looks, where one that waits could miss what it waits for."""

# What torch.distributed says on the ranks that were only talking to the one that failed.
_LOST_PEER = re.compile(
    r"connection (was )?(closed|reset|refused)|closed by (remote )?peer|broken pipe|remote process exited"
    r"|socket (closed|error)|recvvalue failed|sendbytes failed|wait timeout after",
    re.IGNORECASE,
)
_INTERNAL = (os.path.dirname(os.path.abspath(__file__)) + os.sep, threading.__file__)


def group_timeout(timeout: float | None) -> datetime.timedelta | None:
    """The timeout of the ranks' process group, given that of a run, which ends all waiting anyway.

    It must not be the shorter of the two limits: ranks that start at different times wait for each other.
    """
    return None if timeout is None else datetime.timedelta(seconds=max(timeout, START_LIMIT))


@dataclasses.dataclass(frozen=True)
class Failure:
    """The error of one rank. `secondary` when it is only the echo of another rank's error."""

    rank: int
    kind: str
    text: str
    traceback: str = ""
    cause: BaseException | None = None
    secondary: bool = False
    when: float = dataclasses.field(default_factory=time.monotonic)

    @classmethod
    def of(cls, rank: int, error: BaseException) -> Failure:
        """Describe an exception that is being handled on the rank."""
        error.__traceback__ = _outside(error.__traceback__)
        return cls(
            rank=rank,
            kind=type(error).__name__,
            text=str(error),
            traceback="".join(traceback.format_exception(error)),
            cause=error,
            secondary=isinstance(error, AbortedError)
            or (isinstance(error, RuntimeError | OSError) and _LOST_PEER.search(str(error)) is not None),
        )


def _outside(trace: TracebackType | None) -> TracebackType | None:
    """Drop the launcher's own frames at the top."""
    first = trace
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_INTERNAL):
        trace = trace.tb_next
    return trace or first


@dataclasses.dataclass
class Outcome:
    """What the ranks returned, what they raised, and where those are that did neither in time."""

    size: int
    results: dict[int, object] = dataclasses.field(default_factory=dict)
    failures: list[Failure] = dataclasses.field(default_factory=list)
    unfinished: dict[int, str] = dataclasses.field(default_factory=dict)
    timeout: float | None = None

    @property
    def missing(self) -> list[int]:
        """The ranks that have neither returned nor failed."""
        failed = {failure.rank for failure in self.failures}
        return [rank for rank in range(self.size) if rank not in self.results and rank not in failed]

    def values(self) -> list[object]:
        """Return every rank's result, in rank order.

        Raises:
            RankError: a rank failed, or did not return in time.
        """
        if self.failures:
            raise self._failed() from min(self.failures, key=_order).cause
        if self.missing:
            raise self._late()
        return [self.results[rank] for rank in range(self.size)]

    def _failed(self) -> RankError:
        first = min(self.failures, key=_order)
        others = sorted(failure.rank for failure in self.failures if failure is not first)
        also = f"; {_ranks(others)} failed too" if others else ""
        text = message(
            f"rank {first.rank} of {self.size} failed with {first.kind}{also}",
            op="launch",
            got=first.text or "no message",
        )
        if first.traceback:
            text += f"\n\nTraceback of rank {first.rank}:\n\n{first.traceback.rstrip()}"
        return RankError(text, rank=first.rank, rank_traceback=first.traceback)

    def _late(self) -> RankError:
        places = "\n\n".join(
            f"Rank {rank} was here:\n\n{self.unfinished.get(rank, '').rstrip() or '  no answer'}"
            for rank in self.missing
        )
        text = message(
            f"{_ranks(self.missing)} of {self.size} did not return within {self.timeout:g} s",
            op="launch",
            got=f"{_ranks(list(self.results))} returned" if self.results else "no rank returned",
            remedy="see below where each of them was, or give a longer timeout",
        )
        return RankError(f"{text}\n\n{places}")


def _order(failure: Failure) -> tuple[bool, float]:
    return failure.secondary, failure.when


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"
