"""Stacks of other threads, read while they run.

Following frames of a running thread from Python code is unsafe: Python 3.11 may free a frame meanwhile, and reading
`f_back` then crashes the process (a few times in a thousand). So a stack is read by a chain of C functions, during
which no other thread runs, and the result contains code, instruction and line instead of frames.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import traceback
from collections import deque
from collections.abc import Iterator
from itertools import accumulate, chain, islice, repeat
from operator import attrgetter, methodcaller
from types import CodeType

__all__ = ["PARSING", "Place", "main_stack", "shown", "stack_of", "stacks"]

PARSING = threading.RLock()
"""Lock for code that parses source on a rank's thread: formatting tracebacks, signatures, source lines of a class.

`ast.parse` is not thread-safe in CPython 3.11 and 3.12: one of two concurrent calls raises SystemError("AST constructor
recursion depth mismatch").
"""

Place = tuple[CodeType, int, int]
"""The code of a frame, its last instruction, and the line."""

_PLACE = attrgetter("f_code", "f_lasti", "f_lineno")


def stack_of(thread: int | None) -> list[Place]:
    """The stack of a thread, innermost first; empty if there is no such thread."""
    found: deque[Place] = deque()
    frame = map(methodcaller("get", thread), islice(iter(sys._current_frames, None), 1))
    with _no_collection(), contextlib.suppress(AttributeError):  # of None, after the outermost frame
        found.extend(map(_PLACE, accumulate(chain(frame, repeat("f_back")), getattr)))
    return list(found)


def main_stack() -> list[Place]:
    """The stack of the main thread."""
    return stack_of(threading.main_thread().ident)


def stacks() -> dict[int, list[Place]]:
    """The stack of each thread, by thread id."""
    with _no_collection():
        threads = deque(chain.from_iterable(islice(iter(sys._current_frames, None), 1)))
    return {thread: stack_of(thread) for thread in threads}


def shown(stack: list[Place], below: str) -> str:
    """A stack as text, outermost first, of the frames inside the last frame of file `below`."""
    outside = next(
        (depth for depth, (code, _, _) in enumerate(stack) if code.co_filename == below), len(stack)
    )
    lines = [(code.co_filename, line, code.co_name, None) for code, _, line in reversed(stack[:outside])]
    return "".join(traceback.StackSummary.from_list(lines).format())


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Disable garbage collection in the block.

    It runs Python code, and on some versions, such as 3.11.7, deadlocks on the lock that `sys._current_frames` holds.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
