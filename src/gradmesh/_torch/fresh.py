"""Fills uninitialized memory with NaN, to detect reads of it."""

from __future__ import annotations

import torch

from gradmesh._torch.names import find

__all__ = ["fill_fresh_memory"]

_set = find(
    "torch._C._set_deterministic_algorithms",
    without="an audit imports torch's compiler to fill uninitialized memory, which takes seconds once",
)


def fill_fresh_memory(on: bool) -> bool:
    """Switch filling of uninitialized memory (torch.empty) with NaN on or off, for the whole process.

    torch does this while deterministic algorithms are enabled, unless `torch.utils.deterministic` disables it.

    Returns:
        Whether they were enabled before; if so, nothing is changed.
    """
    before = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    if before and not warns:
        return True
    if _set is None:
        torch.use_deterministic_algorithms(on, warn_only=True)
    else:  # the public function imports the compiler, to configure it too
        _set(on, warn_only=True)
    return before
