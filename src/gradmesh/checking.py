"""How much of what the ranks do is compared: nothing, the calls, or what travels too."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Literal

from gradmesh.environment import CHECK, CHECK_LEVELS
from gradmesh.errors import ArgumentError, message
from gradmesh.state import rank_state

__all__ = ["CALLS", "FULL", "Level", "check", "check_level"]

Level = Literal[0, 1, "full"]

CALLS = CHECK_LEVELS["1"]
"""The ranks' calls are compared."""
FULL = CHECK_LEVELS["full"]
"""So is what they hand in."""


_lock = threading.Lock()
_blocks = [0]
"""How many blocks of `check` are open in this process: mostly none, and then no rank has a level of its own."""


def check_level() -> int:
    """What is compared on this rank now: 0, `CALLS` or `FULL`."""
    level = rank_state().check if _blocks[0] else None
    return CHECK.value() if level is None else level


@contextlib.contextmanager
def check(level: Level) -> Iterator[None]:
    """Compare more or less of what the ranks do, inside a block that all of them enter.

    At the level "full" the values are compared too, forward and backward:

    * What is handed in as R or I, an operand or the gradient of a result `dst=gm.I`, has to be the same bits on every
      rank; else `MismatchError`.
    * A `CheckWarning` where the same gradient comes from every rank and is summed (right if each rank's loss is a
      term of the whole, too large by the number of ranks if they repeat the same work), where a NaN or an infinity is
      handed in, with the ranks, and where the ranks make the same call at different lines.
    * Behind a loss that was summed with `dst=gm.I`: a `CheckWarning` where a parameter that is equal on every rank gets
      only each rank's part of its gradient (a missing `gm.replicate`), reported when an optimizer uses the gradient and
      at the end of the block; and where DDP or FSDP averages the gradients of such a loss (see `gradmesh.objective`).

    Args:
        level: 0: nothing; 1: what each rank calls, forward and backward, which is the default; "full": the values too.
            The environment variable GRADMESH_CHECK says what holds outside of any block. It has to be the same on
            every rank.

    Raises:
        ArgumentError: another level.

    Example:
        >>> def on_each_rank():
        ...     with gm.check("full"):
        ...         return gm.all_gather(torch.ones(1)).tolist()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [[1.0, 1.0], [1.0, 1.0]]
    """
    state, wanted = rank_state(), CHECK_LEVELS.get(str(level))
    if wanted is None or isinstance(level, bool):
        raise ArgumentError(
            message(
                "there is no such level",
                op="check",
                expected='0, 1 or "full"',
                got=repr(level),
                remedy='gradmesh.check(1) compares the calls, gradmesh.check("full") what they hand in too',
            )
        )
    before, state.check = state.check, wanted
    with _lock:
        _blocks[0] += 1
    try:
        yield
        if wanted == FULL and state.suspects is not None:
            state.suspects.report()
    finally:
        with _lock:
            _blocks[0] -= 1
        state.check = before
