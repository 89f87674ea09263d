"""Where other threads stand, looked at while they run.

A frame of a thread that runs on may not be followed: Python 3.11 takes it apart under the looker, who then reads memory
that is no frame any more (`f_back` of it kills the process, some times in a thousand). Nothing of another thread runs
while a function of C does, though: a whole look is a chain of such functions, with no line of Python in between, and
what comes out of it are code, instruction and line, no frames.
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
"""Held around what parses source code on a rank's thread: tracebacks as text, signatures, lines of a class.

`ast.parse` counts its depth once for a process in CPython 3.11 and 3.12: of two threads that parse at once, one raises
SystemError("AST constructor recursion depth mismatch").
"""

Place = tuple[CodeType, int, int]
"""The code of a frame, its last instruction, and the line."""

_PLACE = attrgetter("f_code", "f_lasti", "f_lineno")


def stack_of(thread: int | None) -> list[Place]:
    """Where a thread is, innermost first; nothing if there is no such thread."""
    found: deque[Place] = deque()
    frame = map(methodcaller("get", thread), islice(iter(sys._current_frames, None), 1))
    with _no_collection(), contextlib.suppress(AttributeError):  # of None, behind the outermost frame
        found.extend(map(_PLACE, accumulate(chain(frame, repeat("f_back")), getattr)))
    return list(found)


def main_stack() -> list[Place]:
    """Where the main thread is."""
    return stack_of(threading.main_thread().ident)


def stacks() -> dict[int, list[Place]]:
    """Where each thread is, by the thread's number."""
    with _no_collection():
        threads = deque(chain.from_iterable(islice(iter(sys._current_frames, None), 1)))
    return {thread: stack_of(thread) for thread in threads}


def shown(stack: list[Place], below: str) -> str:
    """A stack as text, outermost first, from behind the last frame of a file on."""
    outside = next(
        (depth for depth, (code, _, _) in enumerate(stack) if code.co_filename == below), len(stack)
    )
    lines = [(code.co_filename, line, code.co_name, None) for code, _, line in reversed(stack[:outside])]
    return "".join(traceback.StackSummary.from_list(lines).format())


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Keep the garbage collector from starting meanwhile.

    It runs Python, and with some Pythons, 3.11.7 among them, it waits for ever for the lock that a look at the frames
    holds.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
