"""Where a call was made, and what was handed in, in words: for error texts."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from types import CodeType
from typing import Any

import torch
import typing_extensions

__all__ = ["Site", "call_site", "is_of_the_program", "seen_from", "show_site", "show_tensors", "user_frame"]

_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_INTERNAL = (
    os.path.dirname(os.path.abspath(torch.__file__)) + os.sep,
    _PACKAGE,
    threading.__file__,
    contextlib.__file__,  # which ends the blocks that send
    typing_extensions.__file__,  # around torch's calls that have another name by now
    "<frozen",
)

Site = tuple[CodeType, int] | None

_is_internal: dict[str, bool] = {}
"""For each file of code whether a call from it is none of the user's; there are as many as files of code."""

_seen = threading.local()  # .site: what `call_site` answers in this thread instead of looking


@contextlib.contextmanager
def seen_from(site: Site) -> Iterator[None]:
    """Let `call_site` answer with the place of another thread's call, while its words are put together here."""
    before: Site = getattr(_seen, "site", None)
    _seen.site = site
    try:
        yield
    finally:
        _seen.site = before


def call_site() -> Site:
    """The first frame outside torch and gradmesh, as cheaply as possible: it is only shown in errors."""
    override: Site = getattr(_seen, "site", None)
    if override is not None:
        return override
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        internal = _is_internal.get(code.co_filename)
        if internal is None:
            internal = _is_internal[code.co_filename] = code.co_filename.startswith(_INTERNAL)
        if not internal:
            return code, frame.f_lineno
        frame = frame.f_back  # type: ignore[assignment]
    return None


def show_site(site: Site) -> str:
    """A call site as text."""
    return f"at {site[0].co_filename}:{site[1]} in {site[0].co_name}" if site else "at an unknown place"


def show_tensors(tensors: Sequence[torch.Tensor]) -> str:
    """Dtypes and shapes as text, a few of them."""
    shown = [f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in tensors[:4]]
    if len(set(shown)) == 1 and len(tensors) > 1:
        return f"{len(tensors)} x {shown[0]}"
    return " ".join(shown) + (f" and {len(tensors) - 4} more" if len(tensors) > 4 else "")


def is_of_the_program(file: str) -> bool:
    """Whether code of a file is neither torch's, gradmesh's nor of Python's own start."""
    return not file.startswith(_INTERNAL)


def user_frame(trace: Any) -> Site:
    """The innermost frame of a traceback that is neither torch's, gradmesh's nor of Python's own start."""
    found: Site = None
    while trace is not None:
        code = trace.tb_frame.f_code
        if is_of_the_program(code.co_filename):
            found = code, trace.tb_lineno
        trace = trace.tb_next
    return found
