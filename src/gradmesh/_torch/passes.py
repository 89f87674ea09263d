"""Which pass the caller is in (backward, a checkpoint's first or second), and how a backward pass handles leaves."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from functools import partial
from operator import attrgetter
from types import CodeType
from typing import Any

from torch import Tensor, nn
from torch.autograd import profiler as autograd_profiler
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import record_function
from torch.utils import checkpoint

from gradmesh._torch.modes import dispatch_modes, in_function, outside_modes
from gradmesh._torch.names import Attribute, Missing, find, refuse, required, there

_COLLECTIVE = "a collective"


def _calling_code() -> Iterator[CodeType]:
    """The code of every function on this thread's stack, innermost first."""
    frame = sys._getframe(1)
    while frame is not None:
        yield frame.f_code
        frame = frame.f_back  # type: ignore[assignment]


backward_pass: Callable[[], int] = required("torch._C._current_graph_task_id", _COLLECTIVE)
"""An id of the backward pass on the calling thread, different for nested passes; -1 outside."""


class LastPass:
    """A tensor hook that stores the last backward pass in which the tensor got a gradient."""

    def __init__(self) -> None:
        self._number = -2

    def __call__(self, _: Tensor) -> None:
        """The hook."""
        self._number = backward_pass()

    @property
    def running(self) -> bool:
        """Whether that is the current pass."""
        return self._number == backward_pass()


def in_backward() -> bool:
    """Whether the calling thread runs a backward pass, including recomputation of a checkpoint."""
    return backward_pass() != -1


def _of_checkpoint(code: CodeType) -> bool:
    return code.co_filename == checkpoint.__file__


_saving_hooks = required("torch._C._autograd._top_saved_tensors_default_hooks", _COLLECTIVE)


def saves_for_a_checkpoint() -> bool:
    """Whether saved-tensor hooks are active, as in a non-reentrant checkpoint."""
    return _saving_hooks(True) is not None


_next_node = required("torch._C._autograd._get_sequence_nr", _COLLECTIVE)
_running_node = required("torch._C._current_autograd_node", "the backward of a collective")


_SEQUENCE_NUMBER = Attribute("torch.autograd.graph.Node._sequence_nr", "the backward of a collective")


def function_forward() -> int | None:
    """In the forward of an autograd Function its sequence number on this thread; else None.

    It is that of the last created node, which may belong to a nested Function.
    """
    return _next_node() - 1 if in_function() else None


def function_backward() -> int | None:
    """In a backward pass the sequence number of the current node, else None.

    Also None in the recomputation of a checkpoint, which different nodes may trigger on different ranks.
    """
    if backward_pass() == -1 or (node := _running_node()) is None or checkpoint_region() is not None:
        return None
    number: int = _SEQUENCE_NUMBER.of(node)()
    return number


def checkpoint_region() -> object:
    """An id of the caller's non-reentrant checkpoint region and pass; None outside."""
    hooks = _saving_hooks(True)
    # The hook of the second pass is wrapped for Dynamo.
    code = None if hooks is None else getattr(inspect.unwrap(hooks[0]), "__code__", None)
    if code is None or not _of_checkpoint(code):
        return None
    region: object = hooks[0]
    return region


Context = Callable[[], contextlib.AbstractContextManager[object]]
_SECOND = (
    "in ordered(), the backward of a checkpoint with messages, or collectives under no_grad(), may raise"
)
_pop_hooks = find("torch._C._autograd._pop_saved_tensors_default_hooks", without=_SECOND)
_push_hooks = find("torch._C._autograd._push_saved_tensors_default_hooks", without=_SECOND)
_region = find("torch.utils.checkpoint._CheckpointFrame", without=_SECOND)


class _SecondPass:
    """The function that computes a checkpointed region again, in a context."""

    def __init__(self, run: Callable[..., None], context: Context) -> None:
        self._run, self._context = run, context

    def __call__(self, *args: Any) -> None:
        with self._context():
            self._run(*args)


def recompute_in(context: Context) -> None:
    """Have the checkpointed regions that the caller is in computed again inside a context, each in its first one.

    The second pass may run on a thread of a device, or after the block that the first pass is in.
    """
    if None in (_pop_hooks, _push_hooks, _region):
        return
    outer = []
    try:
        while (hooks := _saving_hooks(True)) is not None:
            if _of_checkpoint(getattr(hooks[0], "__code__", recompute_in.__code__)):
                for cell in hooks[0].__closure__ or ():
                    region = cell.cell_contents
                    if isinstance(region, _region):
                        if isinstance(region.recompute_fn, _SecondPass):
                            return
                        region.recompute_fn = _SecondPass(region.recompute_fn, context)
            _pop_hooks()
            outer.append(hooks)
    finally:
        for hooks in reversed(outer):
            _push_hooks(*hooks)


def in_reentrant_checkpoint() -> bool:
    """Whether the calling code is run by `torch.utils.checkpoint(use_reentrant=True)`, for the first or second time."""
    passes = {checkpoint.CheckpointFunction.forward.__code__, checkpoint.CheckpointFunction.backward.__code__}
    return any(code in passes for code in _calling_code())


profiler_on: Callable[[], bool] = partial(attrgetter("_is_profiler_enabled"), autograd_profiler)
"""Whether torch's profiler is running: a Python flag, which is ten times faster than the C++ query."""

_PROFILING = "torch.autograd.profiler._is_profiler_enabled"
if not there(_PROFILING, without=f"{_COLLECTIVE} raises an error"):
    profiler_on = Missing(_COLLECTIVE, _PROFILING)

_fast_range = find(
    "torch._C._profiler._RecordFunctionFast",
    without="profiler ranges are ops, which a selective checkpoint counts: profile both of its passes or none",
)


def named_range(name: str) -> contextlib.AbstractContextManager[Any]:
    """A range in a profile.

    `record_function` also marks GPU kernels, but is an op that modes intercept: a selective checkpoint fails if the
    profiler ran in only one of its passes. Under such a mode a range that is not an op is used.
    """
    if _fast_range is not None and dispatch_modes() > 0:
        fast: contextlib.AbstractContextManager[Any] = _fast_range(name)
        return fast
    return record_function(name)


def _enter_once() -> None:
    """Enter a range once, because torch imports modules in the first one.

    A profile with stacks reads the names of code objects at its end, and the code of a module is freed after import, so
    that names of modules imported during the profile may be garbage.
    """
    with record_function("gradmesh"):
        pass


outside_modes(_enter_once)


_DEFERRAL = "no_sync()"
_ACCUMULATION = {
    name: find(f"torch._C.{name}", without=f"{_DEFERRAL} raises an error")
    for name in (
        "_will_engine_execute_node",
        "TensorBase._backward_hooks",
        "TensorBase._post_accumulate_grad_hooks",
    )
}
_executes, _hooks, _hooks_behind = _ACCUMULATION.values()
_QUEUE = "torch.autograd.Variable._execution_engine.queue_callback"
_after = find(_QUEUE, without=f'{_DEFERRAL} raises an error; check("full") does not find missing sums')
can_run_after_pass = _after is not None


def can_accumulate_later(x: Tensor) -> bool:
    """Whether a leaf's gradient can be accumulated in a later pass without observable difference.

    Only for an `nn.Parameter`. Any other leaf may be an input whose `.grad` is read after this pass: a received
    pipeline activation, the copy that a reentrant checkpoint makes of its inputs, a cached representation. These cannot
    be distinguished from a parameter otherwise, neither by the time of their creation nor by reuse, since pipelines
    reuse their receive buffers.

    Not for a parameter with hooks, which torch calls in each pass, nor inside of DDP, which reads `.grad` when its hook
    is called.
    """
    if None in (_executes, _hooks, _hooks_behind, _after):
        refuse(_DEFERRAL, _QUEUE, *(f"torch._C.{name}" for name in _ACCUMULATION))
    if not (isinstance(x, nn.Parameter) and x.is_leaf and x.requires_grad):
        return False
    hooked = _hooks.__get__(x) or _hooks_behind.__get__(x)
    return not hooked and DistributedDataParallel.forward.__code__ not in _calling_code()


def leaf_behind(node: Any) -> tuple[Tensor | None, Any]:
    """The leaf that is the first operand of a `Function` node, or None; and its gradient accumulation node."""
    accumulate = node.next_functions[0][0]
    return getattr(accumulate, "variable", None), accumulate


def accumulates(accumulate: Any) -> bool:
    """Whether the pass accumulates into `.grad` of the leaf of this node, instead of returning or skipping it."""
    try:
        executes: bool = _executes(accumulate)
    except RuntimeError:  # raised in autograd.grad, which captures this gradient
        return False
    return executes


def after_pass(work: Callable[[], None]) -> None:
    """Run a callback at the end of the current backward pass, if it succeeds."""
    _after(work)
