"""`no_sync`: gradient accumulation with one gradient reduction for all micro-batches."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from gradmesh.deferred.reductions import DeferredReductions
from gradmesh.deferred.steps import refuse_steps
from gradmesh.errors import OrderError, message
from gradmesh.state import rank_state
from gradmesh.transport import compiling

__all__ = ["DeferredGradients", "no_sync"]


class DeferredGradients:
    """The reductions that `no_sync` has deferred in this thread of a rank.

    Example:
        >>> def on_each_rank():
        ...     w = torch.nn.Parameter(torch.ones(2))
        ...     with gm.no_sync() as deferred:
        ...         gm.replicate(w).sum().backward()
        ...     before, grad = len(deferred), w.grad
        ...     deferred.sync()
        ...     return before, grad, len(deferred), w.grad.tolist()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [(1, None, 0, [2.0, 2.0]), (1, None, 0, [2.0, 2.0])]
    """

    def __init__(self, reductions: DeferredReductions) -> None:
        self._reductions = reductions

    def __len__(self) -> int:
        """The number of deferred reductions: pairs of a leaf and an op."""
        return len(self._reductions)

    def sync(self) -> None:
        """Run the reductions now, on every rank, and add the results to `.grad`.

        For loops that only learn after a micro-batch that it was the last one.

        Raises:
            MismatchError: the ranks have deferred different reductions.
        """
        self._reductions.take()

    def clear(self) -> None:
        """Drop the deferred gradients, on every rank, as for a skipped step. `zero_grad` does not drop them."""
        self._reductions.clear()


@contextlib.contextmanager
def no_sync() -> Iterator[DeferredGradients]:
    """Defer the gradient reductions of parameters until the last micro-batch, as DDP's `no_sync` does.

    ::

        for micro-batches 1 to k - 1, inside:   w.grad is unchanged; this rank's gradients are accumulated
        for micro-batch k, outside:             w.grad += the reduction over the ranks of all k gradients

    What counts is where the forward ran. Inside the block, a linear verb that is applied to an `nn.Parameter`
    (`replicate`, `broadcast`, `all_gather` of a parameter's shard, ...) sends nothing in backward. The first backward
    pass through such a call on the same parameter that was made outside runs the deferred reductions of the axis at its
    end, those of one kind in one message. Gradients equal those without the block up to rounding, with 1/k of the
    bytes. Not deferred, but reduced immediately:

    * tensors that are not parameters, such as a pipeline stage's input, whose `.grad` may be read inside the block;
    * tensors that are not leaves, such as `w * 2` or a list of parameters in one call;
    * calls with `async_op=True`, gradients of `torch.autograd.grad`, passes with `create_graph=True`, torch.func
      transforms and compiled programs;
    * parameters with hooks, and all parameters in DDP.

    Every rank has to enter the block. Until the reductions run, the gradient of each call's result is kept in memory:
    for an `all_gather` it has the size of the gathered tensor. An optimizer step on a parameter with deferred
    reductions raises `OrderError`. `zero_grad` clears `.grad` only.

    Yields:
        The deferred reductions, with `sync()` to run them now and `clear()` to drop them.

    Raises:
        OrderError: an optimizer steps while reductions are deferred, or the block is entered inside torch.compile.

    Example:
        >>> def on_each_rank():
        ...     w = torch.nn.Parameter(torch.ones(1))
        ...     for step in range(3):
        ...         with gm.no_sync() if step < 2 else contextlib.nullcontext():
        ...             loss = (gm.replicate(w) * (step + gm.rank())).sum()
        ...         loss.backward()
        ...     return w.grad.item()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [9.0, 9.0]
    """
    if compiling():
        raise OrderError(
            message(
                "no_sync() is not supported inside torch.compile",
                op="no_sync",
                expected="the block around the call of the compiled function",
                got="the block inside it",
                remedy="write `with gradmesh.no_sync(): loss = compiled(x)`; reductions of the compiled function run "
                "immediately, with correct gradients",
            )
        )
    state = rank_state()
    reductions = state.deferred if isinstance(state.deferred, DeferredReductions) else DeferredReductions()
    state.deferred = reductions
    refuse_steps(reductions)
    reductions.open += 1
    try:
        yield DeferredGradients(reductions)
    finally:
        reductions.open -= 1
