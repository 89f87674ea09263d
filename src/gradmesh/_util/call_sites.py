"""Where a call stands in the program: call sites, the stacks of other threads, and short tracebacks.

Following the frames of a running thread from Python code is unsafe: Python 3.11 may free a frame meanwhile, and reading
`f_back` then crashes the process (a few times in a thousand). So a stack is read by a chain of C functions, during
which no other thread runs, and the result contains code, instruction and line instead of frames.

Uncaught errors of the library are shown without the frames inside of gradmesh and torch; GRADMESH_TRACEBACK=full shows
them.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, chain, islice, repeat
from operator import attrgetter, methodcaller
from types import CodeType, TracebackType
from typing import Any

import torch
import typing_extensions

from gradmesh._util.environment import TRACEBACK
from gradmesh.errors import GradmeshError, RankError

TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
GRADMESH = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_INTERNAL = (
    TORCH,
    GRADMESH,
    threading.__file__,
    contextlib.__file__,  # `coalesce()` sends at the end of its block
    typing_extensions.deprecated.__call__.__code__.co_filename,  # wraps deprecated functions of torch
    "<frozen",
)

Site = tuple[CodeType, int] | None

_is_internal: dict[str, bool] = {}
"""For each source file, whether it belongs to torch, gradmesh or the Python runtime."""

ORIGINS: dict[int, Callable[[], str] | None] = {}
"""For each thread that runs the backward of a call: describes the forward call; None: it did so before."""

_overrides: dict[int, Site] = {}  # by thread: the call site while it runs a call of another one, else None


@contextlib.contextmanager
def seen_from(site: Site) -> Iterator[None]:
    """Make `call_site` return the call site of another thread, whose call runs here."""
    thread = threading.get_ident()
    before, _overrides[thread] = _overrides.get(thread), site
    try:
        yield
    finally:
        _overrides[thread] = before


def call_site(internal_frames: int = 1) -> Site:
    """The innermost frame outside torch and gradmesh; `internal_frames`, this one too, are skipped."""
    if _overrides and (override := _overrides.get(threading.get_ident())) is not None:
        return override
    frame = sys._getframe(internal_frames)
    while frame is not None:
        code = frame.f_code
        internal = _is_internal.get(code.co_filename)
        if internal is None:
            internal = _is_internal[code.co_filename] = code.co_filename.startswith(_INTERNAL)
        if not internal:
            return code, frame.f_lineno
        frame = frame.f_back  # type: ignore[assignment]
    return None


def origin() -> Callable[[], str] | None:
    """Describes the forward call whose backward runs in this thread; None outside of a backward."""
    return ORIGINS.get(threading.get_ident()) if ORIGINS else None


def show_site(site: Site) -> str:
    """A call site as text."""
    return f"at {site[0].co_filename}:{site[1]} in {site[0].co_name}" if site else "at an unknown place"


def show_tensors(tensors: Sequence[torch.Tensor]) -> str:
    """Dtypes and shapes as text, of the first four tensors."""
    shown = [f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in tensors[:4]]
    if len(set(shown)) == 1 and len(tensors) > 1:
        return f"{len(tensors)} x {shown[0]}"
    return " ".join(shown) + (f" and {len(tensors) - 4} more" if len(tensors) > 4 else "")


def is_of_the_program(file: str) -> bool:
    """Whether a file belongs to neither torch, gradmesh nor the Python runtime."""
    return not file.startswith(_INTERNAL)


def user_frame(trace: Any) -> Site:
    """The innermost frame of a traceback outside torch, gradmesh and the Python runtime."""
    found: Site = None
    while trace is not None:
        code = trace.tb_frame.f_code
        if is_of_the_program(code.co_filename):
            found = code, trace.tb_lineno
        trace = trace.tb_next
    return found


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


def stack_text(stack: list[Place], below: str) -> str:
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


_HINT = "  frames inside of gradmesh and torch are hidden: GRADMESH_TRACEBACK=full shows them\n"


def shortened(error: BaseException) -> traceback.TracebackException:
    """The traceback of an error that is being handled; of the library's errors, the frames of the program alone."""
    with PARSING:
        whole = traceback.TracebackException.from_exception(error)
    if isinstance(error, GradmeshError) and not TRACEBACK.value():
        _hide(whole)
    return whole


def _hide(shown: traceback.TracebackException | None) -> None:
    if shown is not None:
        shown.stack[:] = [frame for frame in shown.stack if is_of_the_program(frame.filename)]
        _hide(shown.__cause__)
        _hide(shown.__context__)


def install_excepthook() -> None:
    """Show uncaught errors of the library with a short traceback."""
    if not isinstance(sys.excepthook, _Hook):
        sys.excepthook = _Hook(sys.excepthook)


class _Hook:
    """An excepthook; `other` is the one for all other errors."""

    def __init__(self, other: Callable[..., Any]) -> None:
        self._other = other

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Show an uncaught error."""
        if not isinstance(error, GradmeshError) or TRACEBACK.value():
            self._other(kind, error, trace)
            return
        shown = shortened(error)
        if isinstance(error, RankError):  # its text has the rank's traceback
            shown.__cause__, shown.__suppress_context__ = None, True
        with PARSING:
            text = "".join(shown.format())
        print(text + _HINT, end="", file=sys.stderr)
