"""The outcome of a run on all ranks, for process and thread ranks."""

from __future__ import annotations

import dataclasses
import datetime
import re
import threading
import time
from types import TracebackType

from gradmesh._util.call_sites import GRADMESH, PARSING, TORCH, shortened
from gradmesh.backends.own_group import RETURNED_REMEDY
from gradmesh.errors import AbortedError, DeadlockError, GradmeshError, RankError, message
from gradmesh.runtime.mesh import TIMEOUT

FAILURE_GRACE = 0.5
"""Seconds that the other ranks have to report their failures after the first one."""
START_LIMIT = 300.0
"""Seconds for the ranks to start and rendezvous."""
POLL = 0.2
"""Seconds between two checks of a wait."""

# Error messages of torch.distributed on the peers of a failed rank.
_WAITED = re.compile(r"timed ?out|timeout|DeadlockError(\[.*?\])?: gradmesh", re.IGNORECASE)
_LOST_PEER = re.compile(
    r"connection (was )?(closed|reset|refused)|closed by (remote )?peer|broken pipe|remote process exited"
    r"|socket (closed|error)|recvvalue failed|sendbytes failed|wait timeout after"
    r"|AbortedError(\[.*?\])?: gradmesh",  # C++ converts the error of a future to a RuntimeError
    re.IGNORECASE,
)


def group_timeout(timeout: float | None) -> datetime.timedelta:
    """The timeout of the ranks' process group for a given timeout of a run.

    It must not be shorter than the run's or the start's limit, because ranks start at different times. Without a limit
    of the run it is `world.TIMEOUT` instead of torch's 30 minutes.
    """
    return datetime.timedelta(seconds=TIMEOUT if timeout is None else max(timeout, START_LIMIT))


@dataclasses.dataclass(frozen=True)
class Failure:
    """Why a rank did not return: it raised an exception, or it died."""

    rank: int  # the rank that failed
    kind: str  # the name of the exception's class, or how the rank died
    text: str  # the exception's message, or how the rank died
    expected: str | None = None  # what was expected, if known
    remedy: str | None = None  # what to do, if known
    traceback: str = ""  # the rank's traceback as text; empty if it died
    frames: str = ""  # its frames without the message, for a gradmesh error without a cause; else empty
    # the exception; None if the rank died or the exception cannot be pickled
    cause: BaseException | None = None
    secondary: bool = False  # whether it only reports that another rank failed
    # the time of the failure, by `time.monotonic`, which all processes of a host share
    when: float = dataclasses.field(default_factory=time.monotonic)

    @property
    def waited(self) -> bool:
        """Whether it reports a missing peer, so that the stacks of the other ranks are of interest."""
        return self.secondary or self.kind == "DeadlockError" or _WAITED.search(self.text) is not None

    @classmethod
    def of(cls, rank: int, error: BaseException) -> Failure:
        """Describe an exception of a rank, without the launcher's frames."""
        error.__traceback__ = _outside(error.__traceback__)
        shown = shortened(error)
        with PARSING:  # formatting parses the lines of the frames
            text, frames = "".join(shown.format()), "".join(shown.stack.format())
        # The message of a gradmesh error without a cause is already shown above the traceback.
        message_shown = (
            isinstance(error, GradmeshError)
            and shown.__cause__ is None
            and (shown.__context__ is None or shown.__suppress_context__)
        )
        return cls(
            rank=rank,
            kind=next(kind.__name__ for kind in type(error).__mro__ if not kind.__name__.startswith("_")),
            text=str(error),
            traceback=text,
            frames=frames if message_shown else "",
            cause=error,
            secondary=isinstance(error, AbortedError)
            or (isinstance(error, RuntimeError | OSError) and _LOST_PEER.search(str(error)) is not None),
        )


def _outside(trace: TracebackType | None) -> TracebackType | None:
    """Drop the launcher's frames at the top."""
    first = trace
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith((GRADMESH, threading.__file__)):
        trace = trace.tb_next
    return trace or first


@dataclasses.dataclass
class Outcome:
    """The outcome of a run: results, failures, and the stacks of late ranks."""

    size: int  # the number of ranks
    # the result of each rank that returned
    results: dict[int, object] = dataclasses.field(default_factory=dict)
    # the failures of the others, in the order of their reports
    failures: list[Failure] = dataclasses.field(default_factory=list)
    # the stack, as text, of each late rank that reported it
    unfinished: dict[int, str] = dataclasses.field(default_factory=dict)
    timeout: float | None = None  # seconds that the ranks had to return, or None

    @property
    def missing(self) -> list[int]:
        """The ranks that have neither returned nor failed."""
        failed = {failure.rank for failure in self.failures}
        return [rank for rank in range(self.size) if rank not in self.results and rank not in failed]

    def values(self) -> list[object]:
        """Return every rank's result, in rank order."""
        if self.failures:
            raise self._failed() from min(self.failures, key=_order).cause
        if self.missing:
            raise self._timed_out()
        return [self.results[rank] for rank in range(self.size)]

    def _failed(self) -> RankError:
        first = min(self.failures, key=_order)
        others = sorted(failure.rank for failure in self.failures if failure is not first)
        also = f"; {_ranks(others)} failed too" if others else ""
        waited = first.waited
        if waited and self.missing:
            also += f"; {_ranks(self.missing)} had not returned"
        news = f": {first.text.splitlines()[0].rpartition('gradmesh: ')[2]}" if waited and first.text else ""
        text = message(
            f"rank {first.rank} of {self.size} failed with {first.kind}{also}{news}",
            op="launch",
            expected=first.expected,
            got=first.text or "no message",
            remedy=first.remedy,
        )
        if first.traceback:
            shown = first.frames or first.traceback
            text += f"\n\nTraceback of rank {first.rank}:\n\n{shown.rstrip()}"
        if waited and self.missing:
            text += f"\n\n{self._stacks()}"
        return RankError(text, rank=first.rank, rank_traceback=first.traceback)

    def _timed_out(self) -> RankError:
        text = message(
            f"{_ranks(self.missing)} of {self.size} did not return within {self.timeout:g} s",
            op="launch",
            got=f"{_ranks(list(self.results))} returned" if self.results else "no rank returned",
            remedy=f"check the stacks below, or pass a longer timeout, e.g. timeout={10 * (self.timeout or 60):g}",
        )
        return RankError(f"{text}\n\n{self._stacks()}")

    def _stacks(self) -> str:
        """The stack of each rank that has neither returned nor failed."""
        return "\n\n".join(
            f"Stack of rank {rank}:\n\n{self.unfinished.get(rank, '').rstrip() or '  not available'}"
            for rank in self.missing
        )

    def record_deadlock(self, waiting: dict[int, str]) -> None:
        """Record a deadlock: the remaining ranks wait for one that has returned, or for each other."""
        s = "s" * (len(waiting) == 1)
        gone = f"{_ranks(list(self.results))} returned, and " if self.results else ""
        text = message(
            f"{gone}{_ranks(list(waiting))} {'still ' if gone else ''}wait{s} in a collective"
            f"{'' if gone else ' for each other'}",
            expected="the same collectives on every rank before its function returns",
            got="\n".join(
                f"rank {rank} waits at {last_place(stack)}" for rank, stack in sorted(waiting.items())
            ),
            remedy=RETURNED_REMEDY,
        )
        for rank, stack in sorted(waiting.items()):
            self.failures.append(
                Failure(rank, "DeadlockError", text, traceback=stack, cause=DeadlockError(text))
            )


def last_place(stack: str) -> str:
    """The innermost line of a stack outside of torch and gradmesh; in a backward, with the forward call."""
    places = [line.strip() for line in stack.splitlines() if line.lstrip().startswith("File ")]
    own = [place for place in places if not any(part in place for part in (TORCH, GRADMESH))]
    origin = [f", {line.strip()}" for line in stack.splitlines() if line.startswith("  in the ")]
    return "".join([(own or places or ["an unknown line"])[-1].removeprefix("File "), *origin])


def _order(failure: Failure) -> tuple[bool, float]:
    return failure.secondary, failure.when


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"
