"""What becomes of the gradient of a leaf in the backward pass that runs, and work for the end of that pass."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradmesh._torch.names import find

__all__ = ["accumulates", "after_pass", "can_accumulate_later", "can_run_after_pass", "leaf_behind"]

_SUMMED_AT_ONCE = (
    "no_sync() puts nothing off: sums owed to leaves are taken in each backward pass, which is right"
)

_executes = find("torch._C._will_engine_execute_node", without=_SUMMED_AT_ONCE)
_after = find(
    "torch.autograd.Variable._execution_engine.queue_callback",
    without=f'{_SUMMED_AT_ONCE}; check("full") does not find sums that are missing',
)
_hooks = find("torch._C.TensorBase._backward_hooks", without=_SUMMED_AT_ONCE)
_hooks_behind = find("torch._C.TensorBase._post_accumulate_grad_hooks", without=_SUMMED_AT_ONCE)
can_run_after_pass = _after is not None
_there = None not in (_executes, _after, _hooks, _hooks_behind)


def can_accumulate_later(x: Tensor) -> bool:
    """Whether nobody would see that a tensor gets its gradient in a later pass, and all at once.

    True for an `nn.Parameter` alone. Any other leaf may be an input whose `.grad` is read after this pass: a received
    pipeline activation, the copy that a reentrant checkpoint makes of its inputs, a cached representation. Nothing
    else distinguishes these from a parameter: neither when they were made nor whether they are used again, as
    pipelines keep their receive buffers.

    Not so for a parameter with hooks, which torch calls in each pass, with None where there is nothing yet; nor inside
    of DDP, which takes what is in `.grad` as soon as its own hook is called.
    """
    if not (_there and isinstance(x, nn.Parameter) and x.is_leaf and x.requires_grad):
        return False
    return not (_hooks.__get__(x) or _hooks_behind.__get__(x) or _inside_ddp())


def _inside_ddp() -> bool:
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is DistributedDataParallel.forward.__code__:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def leaf_behind(node: Any) -> tuple[Tensor | None, Any]:
    """The leaf that is the first operand of a node of a `Function`, or None; and the node that accumulates into it."""
    accumulate = node.next_functions[0][0]
    return getattr(accumulate, "variable", None), accumulate


def accumulates(accumulate: Any) -> bool:
    """Whether the pass adds to `.grad` of the leaf, rather than handing a gradient to the caller or leaving it out.

    Args:
        accumulate: the node that accumulates into the leaf.
    """
    try:
        executes: bool = _executes(accumulate)
    except RuntimeError:  # torch's way to say that this is autograd.grad, which captures what would come here
        return False
    return executes


def after_pass(work: Callable[[], None]) -> None:
    """Do something at the end of the backward pass that runs, if it does not fail."""
    _after(work)
