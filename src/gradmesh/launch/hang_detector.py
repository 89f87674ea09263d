"""Whether the ranks that have not returned all wait: asked by the launcher, answered by a thread of each process.

Under shm and threads the backend knows. With torch's own backends a rank waits inside C++, so it is guessed from
outside, and only what cannot be anything else counts: for a while the main thread has stood at the same place, that
place is a call of torch.distributed, of gradmesh, of autograd or of a `wait`, and the process has neither used nor
wanted processor time, so that nothing is being computed or moved by any of its threads. A process with threads of the
program's own, or with child processes, is never counted: what it waits for may come from there. A whole machine can be
held up for seconds, so what lies between two looks counts for little, and it takes several.
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

import torch

from gradmesh.stacks import Place, main_stack, shown, stacks

__all__ = ["MainThread", "Probe", "others_at_work", "waits_in"]

_EVERY = 0.5
"""Seconds between two questions."""
_SELDOM = 1.0
"""Seconds between two where no rank has returned: ranks may then wait for each other, in groups that cross."""
_COUNTED = 0.75
"""Seconds that may count between two looks: a machine that was held up is nobody's waiting."""
_LONG = 1.5
"""Seconds for which all ranks that have not returned have to wait before it counts as the end."""

_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_GRADMESH = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_WAITS = (
    os.path.join(_TORCH, "distributed", "distributed_c10d.py"),
    os.path.join(_TORCH, "distributed", "_functional_collectives.py"),
    os.path.join(_TORCH, "autograd", "graph.py"),
    os.path.join(_TORCH, "futures", "__init__.py"),
    os.path.join(_GRADMESH, "backends", ""),
    os.path.join(_GRADMESH, "wire", ""),
)
_WAIT_NAMES = {"wait", "result", "synchronize", "wait_tensor"}
_BUSY = 0.1
"""Of a core; a process that uses or wants more is at work."""


class MainThread:
    """The main thread of this process, looked at now and then."""

    def __init__(self) -> None:
        self._place: tuple[tuple[CodeType, int], ...] = ()
        self._waited = 0.0
        self._seen, self._wanted = time.monotonic(), _wanted()

    def waits(self) -> float:
        """For how many seconds it has waited for other ranks, as far as can be seen; 0.0 if it does not.

        At the first look, and at the first after it moved, that is 0.0 too.
        """
        stack = main_stack()
        now, wanted = time.monotonic(), _wanted()
        place = tuple((code, instruction) for code, instruction, _ in stack) if waits_in(stack) else ()
        between = now - self._seen
        busy = wanted - self._wanted > _BUSY * between or others_at_work()
        stands = bool(place) and place == self._place and not busy
        self._waited = self._waited + min(between, _COUNTED) if stands else 0.0
        self._place, self._seen, self._wanted = place, now, wanted
        return self._waited

    def stack(self, below: str) -> str:
        """Where it is, as text, from the last frame of a file on."""
        return shown(main_stack(), below)


class Probe:
    """The launcher's questions, once a rank has returned or for a while none has, and the ranks' last answers.

    Args:
        ask: sends a question to a rank.
    """

    def __init__(self, ask: Callable[[int], None]) -> None:
        self._ask = ask
        self._asked = 0.0
        self._answers: dict[int, tuple[float, str]] = {}
        self._returned = (0, 0.0)  # how many ranks, and since when so many

    def answer(self, rank: int, payload: bytes) -> None:
        """Take a rank's answer."""
        self._answers[rank] = pickle.loads(payload)

    def waiting(self, missing: Iterable[int], returned: int) -> dict[int, str]:
        """The stack of each rank that has not returned, if all of them wait; asks again now and then.

        Args:
            missing: the ranks that have not returned.
            returned: how many have.
        """
        missing, now = list(missing), time.monotonic()
        if returned + len(missing) == 1:
            return {}  # it has nobody to wait for, and only gets no processor time where a machine is overloaded
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
    """Seconds of processor time that this process has used, and that its main thread has waited for."""
    delayed = 0
    with contextlib.suppress(OSError, IndexError, ValueError):  # another system
        delayed = int(Path("/proc/self/schedstat").read_text().split()[1])
    return time.process_time() + delayed / 1e9


def others_at_work() -> bool:
    """Whether a thread of the program's own, or a process that it started, may yet do what a rank waits for."""
    main = threading.main_thread().ident
    for thread, stack in stacks().items():
        started = [code.co_filename for code, _, _ in stack if code.co_filename != threading.__file__]
        # A thread with no frame outside of the standard library's is a timer.
        if thread != main and not (started and started[-1].startswith(_GRADMESH)):
            return True
    try:
        tasks = os.listdir("/proc/self/task")
        return any(Path(f"/proc/self/task/{task}/children").read_text() for task in tasks)
    except OSError:  # another system, or a thread that has just ended
        return False


def waits_in(stack: Sequence[Place]) -> bool:
    """Whether a thread that stands still there waits for other ranks: it is inside of a call that does."""
    files = [code.co_filename for code, _, _ in stack]
    inside = itertools.takewhile(lambda file: file.startswith((_TORCH, _GRADMESH)), files)
    if any(file.startswith(_WAITS) for file in inside):
        return True
    # A work is waited for in C++, which has no frame of Python's.
    outside = bool(stack) and not files[0].startswith((_TORCH, _GRADMESH))
    return outside and _called(*stack[0][:2]) in _WAIT_NAMES


def _called(code: CodeType, last: int) -> str | None:
    """The name of the method that a frame is in the middle of calling, as far as its code tells."""
    name = None
    for instruction in dis.get_instructions(code):
        if instruction.offset > last:
            break
        if instruction.opname in ("LOAD_METHOD", "LOAD_ATTR"):
            name = instruction.argval
    return name
