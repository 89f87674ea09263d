"""Tracebacks of the library's errors, without the frames inside of gradmesh and torch.

GRADMESH_TRACEBACK=full shows these frames.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any

from gradmesh.call_sites import is_of_the_program
from gradmesh.environment import TRACEBACK
from gradmesh.errors import GradmeshError, RankError
from gradmesh.stacks import PARSING

__all__ = ["install", "shortened"]

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


def install() -> None:
    """Show uncaught errors of the library with a short traceback."""
    if not isinstance(sys.excepthook, _Hook):
        sys.excepthook = _Hook(sys.excepthook)


class _Hook:
    """An excepthook.

    Args:
        other: the one for all other errors.
    """

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
