"""Gradient accumulation without a sum over the ranks in every micro-batch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from gradmesh.deferred.reductions import DeferredReductions
from gradmesh.deferred.steps import refuse_steps
from gradmesh.errors import OrderError, message
from gradmesh.state import rank_state
from gradmesh.transport import compiling

__all__ = ["Owed", "no_sync"]


class Owed:
    """What `no_sync` has put off in this thread of a rank.

    Example:
        >>> def on_each_rank():
        ...     w = torch.nn.Parameter(torch.ones(2))
        ...     with gm.no_sync() as owed:
        ...         gm.replicate(w).sum().backward()
        ...     before, grad = len(owed), w.grad
        ...     owed.sync()
        ...     return before, grad, len(owed), w.grad.tolist()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [(1, None, 0, [2.0, 2.0]), (1, None, 0, [2.0, 2.0])]
    """

    def __init__(self, reductions: DeferredReductions) -> None:
        self._reductions = reductions

    def __len__(self) -> int:
        """For how many pairs of a leaf and an op a sum is put off."""
        return len(self._reductions)

    def sync(self) -> None:
        """Take the sums now, on every rank, and add them to `.grad`: for a last micro-batch that shows too late.

        Raises:
            MismatchError: the ranks have put off different sums.
        """
        self._reductions.take()

    def clear(self) -> None:
        """Drop what was put off, on every rank, as for a step that is left out. `zero_grad` leaves it as it is."""
        self._reductions.clear()


@contextlib.contextmanager
def no_sync() -> Iterator[Owed]:
    """Defer the gradient reductions of parameters until the last micro-batch, as DDP's `no_sync` does.

    ::

        for micro-batches 1 to k - 1, inside:   w.grad stays as it is; this rank's gradients are added up
        for micro-batch k, outside:             w.grad += the sum over the ranks of what k micro-batches gave

    What counts is where the forward ran. Inside of the block a verb that is applied to an `nn.Parameter` (`replicate`,
    `broadcast`, `all_gather` of a parameter's shard, any linear verb whose backward sends) sends nothing in backward.
    The first backward pass through such a call on the same parameter that was made outside takes the sums at its end:
    all deferred ones of the axis, of one kind in one message. Gradients are those without the block to rounding, and
    the bytes for them 1/k. Reduced at once as ever are other tensors that require grad, whose `.grad` may be read
    inside of the block, as a pipeline stage's input; what is not a leaf, as `w * 2` or a list of parameters in one
    call; calls with `async_op=True`; what `torch.autograd.grad` asks for; what is differentiated under
    `create_graph=True`, in torch.func transforms and in compiled programs; parameters with hooks; and all in DDP.

    Every rank enters the block alike. Until the sums are taken, each parameter has a gradient of the result of its
    call in memory: for an `all_gather` that is as large as what was gathered. An optimizer step on a parameter with
    deferred reductions is refused. `zero_grad` clears `.grad` alone.

    Yields:
        What is put off, with `sync()` to take the sums at another time and `clear()` to drop them.

    Raises:
        OrderError: an optimizer steps, or the block is entered in a program that is being compiled.

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
                "the block is entered in a program that is being compiled",
                op="no_sync",
                expected="a block around the call of the compiled function",
                got="a block inside of it",
                remedy="enter it outside; what is compiled takes its sums at once, which is right",
            )
        )
    state = rank_state()
    reductions = state.deferred if isinstance(state.deferred, DeferredReductions) else DeferredReductions()
    state.deferred = reductions
    refuse_steps(reductions)
    reductions.open += 1
    try:
        yield Owed(reductions)
    finally:
        reductions.open -= 1
