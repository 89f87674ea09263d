"""Call sites and operands as text, for error messages."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import CodeType
from typing import Any

import torch
import typing_extensions

__all__ = [
    "ORIGINS",
    "Site",
    "call_site",
    "is_of_the_program",
    "origin",
    "seen_from",
    "show_site",
    "show_tensors",
    "user_frame",
]

_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_INTERNAL = (
    os.path.dirname(os.path.abspath(torch.__file__)) + os.sep,
    _PACKAGE,
    threading.__file__,
    contextlib.__file__,  # `coalesce()` sends at the end of its block
    typing_extensions.__file__,  # wraps deprecated functions of torch
    "<frozen",
)

Site = tuple[CodeType, int] | None

_is_internal: dict[str, bool] = {}
"""For each source file, whether it belongs to torch, gradmesh or the Python runtime."""

ORIGINS: dict[int, Callable[[], str]] = {}
"""For each thread that runs the backward of a call: describes the forward call."""

_seen = threading.local()  # .site: overrides `call_site` in this thread


@contextlib.contextmanager
def seen_from(site: Site) -> Iterator[None]:
    """Make `call_site` return the call site of another thread, whose call runs here."""
    before: Site = getattr(_seen, "site", None)
    _seen.site = site
    try:
        yield
    finally:
        _seen.site = before


def call_site() -> Site:
    """The innermost frame outside torch and gradmesh; cheap, as it is only shown in errors."""
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
