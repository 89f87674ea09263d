"""`reorderable`: allow compilers to reorder collectives."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from gradmesh.state import rank_state

__all__ = ["reorderable"]


@contextlib.contextmanager
def reorderable() -> Iterator[None]:
    """Allow the compiler to reorder and bucket the collectives of functions that are compiled in the block.

    Without it a compiled function runs its collectives in program order, forward and backward. Inside the block,
    symmetric collectives become functional collectives, which Inductor may overlap with other work, bucket and reorder.
    Inductor sees the program of one rank only. So you promise that **every rank compiles the same program**: operands
    of the same shapes, no rank-dependent branches or work, and every result used on every rank. If the programs differ,
    ranks may run their collectives in different orders, which gives wrong values or a hang; these calls are not
    compared.

    The setting is read at compile time; a function that was compiled outside of the block is compiled again inside it.
    Other collectives (uneven sizes, `shift`, `scan`, `reduce`, ...) keep their order relative to each other.

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
