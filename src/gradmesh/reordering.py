"""The promise that lets a compiler move collectives."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from gradmesh.state import rank_state

__all__ = ["reorderable"]


@contextlib.contextmanager
def reorderable() -> Iterator[None]:
    """Let a compiler move and bucket the collectives of functions that are compiled in the block.

    Without it a compiled function makes its collectives in the order in which they are written, forward and backward.
    Inside the block those in which all ranks send alike are functional collectives, which Inductor may overlap with
    other work, bucket and move. It sees the program of one rank. So this is a promise: **every rank compiles one
    program**, with operands of the same shapes, no branch or other work on some ranks, and every result used on all of
    them. Where the programs differ, ranks may run their collectives in different orders: wrong values, or a hang; the
    moved calls are not compared.

    It is looked up when a function is compiled; a function that was compiled outside of the block is compiled again
    inside of it. Collectives in which the ranks differ (uneven sizes, `shift`, `scan`, `reduce`, ...) keep their order
    among themselves.

    Example:
        >>> def step(x):
        ...     return (gm.all_gather(x) ** 2).sum()
        >>> compiled = torch.compile(step, fullgraph=True)
        >>> with gm.reorderable():
        ...     pass  # loss = compiled(x)
    """
    state = rank_state()
    before, state.reorderable = state.reorderable, True
    try:
        yield
    finally:
        state.reorderable = before
