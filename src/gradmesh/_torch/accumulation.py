"""How the current backward pass handles the gradient of a leaf, and callbacks at the end of the pass."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradmesh._torch.names import find

__all__ = ["accumulates", "after_pass", "can_accumulate_later", "can_run_after_pass", "leaf_behind"]

_NOT_DEFERRED = "no_sync() does not defer reductions: each backward pass sums, which is correct but slower"

_executes = find("torch._C._will_engine_execute_node", without=_NOT_DEFERRED)
_after = find(
    "torch.autograd.Variable._execution_engine.queue_callback",
    without=f'{_NOT_DEFERRED}; check("full") does not find missing sums',
)
_hooks = find("torch._C.TensorBase._backward_hooks", without=_NOT_DEFERRED)
_hooks_behind = find("torch._C.TensorBase._post_accumulate_grad_hooks", without=_NOT_DEFERRED)
can_run_after_pass = _after is not None
_there = None not in (_executes, _after, _hooks, _hooks_behind)


def can_accumulate_later(x: Tensor) -> bool:
    """Whether a leaf's gradient can be accumulated in a later pass without observable difference.

    Only for an `nn.Parameter`. Any other leaf may be an input whose `.grad` is read after this pass: a received
    pipeline activation, the copy that a reentrant checkpoint makes of its inputs, a cached representation. These cannot
    be distinguished from a parameter otherwise, neither by the time of their creation nor by reuse, since pipelines
    reuse their receive buffers.

    Not for a parameter with hooks, which torch calls in each pass, nor inside of DDP, which reads `.grad` when its hook
    is called.
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
    """The leaf that is the first operand of a `Function` node, or None; and its gradient accumulation node."""
    accumulate = node.next_functions[0][0]
    return getattr(accumulate, "variable", None), accumulate


def accumulates(accumulate: Any) -> bool:
    """Whether the pass accumulates into `.grad` of the leaf, instead of returning the gradient or skipping it.

    Args:
        accumulate: the node that accumulates into the leaf.
    """
    try:
        executes: bool = _executes(accumulate)
    except RuntimeError:  # raised in autograd.grad, which captures this gradient
        return False
    return executes


def after_pass(work: Callable[[], None]) -> None:
    """Run a callback at the end of the current backward pass, if it succeeds."""
    _after(work)
