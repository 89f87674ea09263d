"""Detects a hang: all ranks that have not returned wait for each other.

The launcher queries a thread in each process. The shm and threads backends detect hangs themselves; with torch's
backends a rank waits inside C++, so that the state is inferred. To avoid false alarms a rank counts as waiting only if
its main thread has not moved for some time, is inside a call of torch.distributed, gradmesh, autograd or a `wait`, and
the process has neither used nor requested CPU time. A process with user threads or child processes never counts, since
these may complete the wait. A host can be suspended for seconds, so the time between two queries is capped and several
queries are needed.
"""

from __future__ import annotations

import contextlib
import dis
import itertools
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import CodeType

from gradmesh._util.call_sites import GRADMESH, ORIGINS, TORCH, Place, main_stack, stack_text, stacks

_EVERY = 0.5
"""Seconds between two queries."""
_SELDOM = 1.0
"""Seconds between two queries if no rank has returned: ranks may deadlock with calls on overlapping groups."""
_COUNTED = 0.75
"""Maximum seconds that count between two queries, so that a suspended host does not count as a hang."""
_LONG = 1.5
"""Seconds for which all remaining ranks must wait to count as a hang."""

_WAITS = (
    os.path.join(TORCH, "distributed", "distributed_c10d.py"),
    os.path.join(TORCH, "distributed", "_functional_collectives.py"),
    os.path.join(TORCH, "autograd", "graph.py"),
    os.path.join(TORCH, "futures", "__init__.py"),
    os.path.join(GRADMESH, "backends", ""),
    os.path.join(GRADMESH, "transport", ""),
)
_BUSY = 0.1
"""Fraction of a core; a process that uses or requests more is computing."""


class MainThread:
    """Observes the main thread of this process."""

    def __init__(self) -> None:
        self._place: tuple[tuple[CodeType, int], ...] = ()
        self._waited = 0.0
        self._seen, self._wanted = time.monotonic(), _wanted()

    def waits(self) -> float:
        """Seconds for which it has waited for other ranks; 0.0 at the first call, and whenever it has moved."""
        stack = main_stack()
        now, wanted = time.monotonic(), _wanted()
        place = tuple((code, instruction) for code, instruction, _ in stack) if is_waiting_in(stack) else ()
        between = now - self._seen
        busy = wanted - self._wanted > _BUSY * between or has_other_work()
        stands = bool(place) and place == self._place and not busy
        self._waited = self._waited + min(between, _COUNTED) if stands else 0.0
        self._place, self._seen, self._wanted = place, now, wanted
        return self._waited

    def stack(self, below: str) -> str:
        """Its stack as text, starting below the frames of the file `below`; in a backward, with the forward call."""
        origin = ORIGINS.get(threading.main_thread().ident or 0)
        return stack_text(main_stack(), below) + (f"  in {origin()}\n" if origin else "")


class Probe:
    """The launcher's queries to ranks that have not returned, and their last answers."""

    def __init__(self, ask: Callable[[int], None]) -> None:
        self._ask = ask
        self._asked = 0.0
        self._answers: dict[int, tuple[float, str]] = {}
        self._returned = (0, 0.0)  # number of returned ranks, and since when

    def answer(self, rank: int, payload: bytes) -> None:
        """Store a rank's answer."""
        self._answers[rank] = pickle.loads(payload)

    def waiting(self, missing: Iterable[int], returned: int) -> dict[int, str]:
        """The stack of each rank that has not returned, if all of them wait, else {}; sends queries periodically."""
        missing, now = list(missing), time.monotonic()
        if returned + len(missing) == 1:
            return {}  # a single rank has no peers to wait for
        if returned != self._returned[0]:
            self._returned = returned, now
            self._answers.clear()
        answers = [self._answers.get(rank, (0.0, "")) for rank in missing]
        if now - self._returned[1] > _LONG and all(seconds > _LONG for seconds, _ in answers):
            return {rank: stack for rank, (_, stack) in zip(missing, answers, strict=True)}
        if now - self._asked > (_EVERY if returned else _SELDOM):
            self._asked = now
            self._answers.clear()
            for rank in missing:
                self._ask(rank)
        return {}


def _wanted() -> float:
    """Seconds of CPU time that this process has used, plus those its main thread was runnable but not scheduled."""
    delayed = 0
    with contextlib.suppress(OSError, IndexError, ValueError):  # not Linux
        delayed = int(Path("/proc/self/schedstat").read_text().split()[1])
    return time.process_time() + delayed / 1e9


def has_other_work() -> bool:
    """Whether the process has user threads or child processes, which may complete a wait."""
    main = threading.main_thread().ident
    for thread, stack in stacks().items():
        started = [code.co_filename for code, _, _ in stack if code.co_filename != threading.__file__]
        # A thread with frames of the standard library only is a timer, which may run user code.
        if thread != main and not (started and started[-1].startswith(GRADMESH)):
            return True
    try:
        tasks = os.listdir("/proc/self/task")
        return any(Path(f"/proc/self/task/{task}/children").read_text() for task in tasks)
    except OSError:  # not Linux, or a thread that has just ended
        return False


def is_waiting_in(stack: Sequence[Place]) -> bool:
    """Whether a stack is inside a call that waits for other ranks."""
    files = [code.co_filename for code, _, _ in stack]
    inside = itertools.takewhile(lambda file: file.startswith((TORCH, GRADMESH)), files)
    if any(file.startswith(_WAITS) for file in inside):
        return True
    # Work.wait() is in C++ and has no Python frame.
    outside = bool(stack) and not files[0].startswith((TORCH, GRADMESH))
    return outside and _called(*stack[0][:2]) in ("wait", "result", "synchronize", "wait_tensor")


def _called(code: CodeType, last: int) -> str | None:
    """The name of the method that a frame is calling, guessed from its bytecode."""
    name = None
    for instruction in dis.get_instructions(code):
        if instruction.offset > last:
            break
        if instruction.opname in ("LOAD_METHOD", "LOAD_ATTR"):
            name = instruction.argval
    return name
