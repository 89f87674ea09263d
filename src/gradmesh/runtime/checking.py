"""The check level: whether the ranks compare nothing, their calls, now or deferred, or their values too."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Literal

from gradmesh._util.environment import CHECK_LEVELS
from gradmesh.errors import ArgumentError
from gradmesh.runtime.state import CHECK_BLOCKS, rank_state

Level = Literal[0, 1, "deferred", "full"]

CALLS = CHECK_LEVELS["1"]
"""Compare the ranks' calls."""
DEFERRED = CHECK_LEVELS["deferred"]
"""Compare the ranks' calls after they were made."""
FULL = CHECK_LEVELS["full"]
"""Compare the values of their operands too."""


_lock = threading.Lock()


@contextlib.contextmanager
def check(level: Level) -> Iterator[None]:
    """Set the check level inside a block that every rank enters.

    At level 1 the calls are compared before anything is sent. Calls on tensors off the CPU are compared after they were
    made instead, since a message before would have to wait for the device; so is every call at level "deferred", except
    on shm and threads, where comparing costs nothing. The error then comes at the rank's next call, or before an
    optimizer uses the gradients, at `gradmesh.join` and at the end of a launched function; the ranks' groups cannot be
    used any more.

    At level "full" the values of CPU tensors are compared too, forward and backward:

    * `MismatchError` if an R or I operand, or the gradient of a result with `dst=gm.I`, is not bitwise equal on every
      rank.
    * A `CheckWarning` if a gradient that is equal on every rank is summed (right if the loss is the sum of the ranks'
      losses, world_size times too large if they repeat the same work), if an operand contains a NaN or an infinity, and
      if the ranks make the same call at different source lines.
    * For a loss that was summed with `dst=gm.I`: a `CheckWarning` if a parameter that is equal on every rank gets only
      each rank's part of its gradient (a missing `gm.replicate`), reported when an optimizer uses the gradient and at
      the end of the block; and if DDP or FSDP averages the gradients of such a loss (see `gradmesh.objective`).

    Args:
        level: 0: compare nothing; 1 (default): each rank's calls, forward and backward; "deferred": the same after the
            calls; "full": the values too. The environment variable GRADMESH_CHECK sets the level outside of any block.
            It has to be the same on every rank.

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
        raise ArgumentError.of(
            "invalid check level",
            op="check",
            expected='0, 1, "deferred" or "full"',
            got=repr(level),
            remedy='use gradmesh.check(1) to compare the calls, gradmesh.check("full") to compare the values too',
        )
    before, state.check = state.check, wanted
    with _lock:
        CHECK_BLOCKS[0] += 1
    try:
        yield
        if wanted == FULL and state.suspects is not None:
            state.suspects.report()
    finally:
        with _lock:
            CHECK_BLOCKS[0] -= 1
        state.check = before
