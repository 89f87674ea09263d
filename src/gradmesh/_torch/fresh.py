"""Memory that torch hands out uninitialised, filled with NaN, so that what nobody wrote is seen."""

from __future__ import annotations

import torch

from gradmesh._torch.names import find

__all__ = ["fill_fresh_memory"]

_set = find(
    "torch._C._set_deterministic_algorithms",
    without="an audit loads torch's compiler when it fills fresh memory, which takes seconds once",
)


def fill_fresh_memory(on: bool) -> bool:
    """Fill what torch.empty and the like return with NaN, or not; for the whole process.

    torch does so while deterministic algorithms are asked for, and `torch.utils.deterministic` does not say otherwise.

    Returns:
        Whether they were asked for before; where they were, nothing is changed.
    """
    before = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    if before and not warns:
        return True
    if _set is None:
        torch.use_deterministic_algorithms(on, warn_only=True)
    else:  # the public function imports the compiler first, to tell it too
        _set(on, warn_only=True)
    return before
