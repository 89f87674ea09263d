"""The caller's differentiation and dispatch modes, and how kernels leave them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from gradmesh._torch.names import Missing, find, required
from gradmesh._torch.threads import LEVEL, level_is_known

T = TypeVar("T")

_COLLECTIVE = "a collective"

functorch_active: Callable[[], bool] = required("torch._C._are_functorch_transforms_active", _COLLECTIVE)
"""Whether a torch.func transform is running."""

unwrap_if_dead = find("torch._C._functorch.unwrap_if_dead", without="small calls take a little longer")
"""The tensor in a wrapper of a torch.func transform that is over."""


def to_list(x: Tensor) -> list[Any]:
    """`x.tolist()`, which torch 2.9 cannot do inside of a torch.func transform."""
    if torch.__version__ < "2.11" and functorch_active():
        return [to_list(each) if each.dim() else each.item() for each in x.detach()]
    found: list[Any] = x.tolist()
    return found


def forward_level_open() -> bool:
    """Whether a forward-mode level is open."""
    return forward_ad._current_level >= 0


def transforms_active() -> bool:
    """Whether a torch.func transform or a forward-mode level is active.

    >>> transforms_active()
    False
    """
    return functorch_active() or forward_ad._current_level >= 0


forward_level: Callable[[], int] = partial(attrgetter("_current_level"), forward_ad)
"""The forward-mode level, negative where none is open; in C, for small calls."""

if not level_is_known:
    forward_level_open = transforms_active = forward_level = Missing(_COLLECTIVE, LEVEL)

_interpreters = required("torch._C._functorch.get_interpreter_stack", "a collective inside of a transform")
_vmap = find(
    "torch._C._functorch.TransformType.Vmap",
    without="every torch.func transform is treated as a derivative, so that vmap inside ordered() raises",
)


def only_vmap_active() -> bool:
    """Whether no torch.func transform other than vmap is running."""
    return not functorch_active() or all(layer.key() == _vmap for layer in _interpreters() or [])


_set_grad = required("torch._C._set_grad_enabled", _COLLECTIVE)
_forward_on = required("torch._C._is_fwd_grad_enabled", _COLLECTIVE)
_set_forward = required("torch._C._set_fwd_grad_enabled", _COLLECTIVE)


def without_autograd(work: Callable[[], T]) -> T:
    """Run `work` without backward-mode and forward-mode recording."""
    grad, forward = torch.is_grad_enabled(), _forward_on()
    _set_grad(False)
    _set_forward(False)
    try:
        return work()
    finally:
        _set_forward(forward)
        _set_grad(grad)


def in_function() -> bool:
    """Whether the caller runs in the forward of an autograd Function, where torch disables both modes.

    >>> in_function()
    False
    """
    return not (torch.is_grad_enabled() or _forward_on() or torch.is_inference_mode_enabled())


dispatch_modes: Callable[[], int] = required("torch._C._len_torch_dispatch_stack", _COLLECTIVE)
function_modes: Callable[[], int] = required("torch._C._len_torch_function_stack", _COLLECTIVE)
_IN_MODE = "a collective inside of a mode"
_no_functions = required("torch._C.DisableTorchFunction", _IN_MODE)
_no_dispatch = required("torch.utils._python_dispatch._disable_current_modes", _IN_MODE)


_RUNS_ONCE = "make_fx and torch.jit.trace record the result of a collective as a constant"
_mode = find("torch._C._get_dispatch_mode", without=_RUNS_ONCE)
_proxy = find("torch._C._TorchDispatchModeKey.PROXY", without=_RUNS_ONCE)
_functional = find("torch._C._TorchDispatchModeKey.FUNCTIONAL", without=_RUNS_ONCE)
script_state: Callable[[], object] = find("torch._C._get_tracing_state", without=_RUNS_ONCE) or (lambda: None)
"""What torch.jit.trace has recorded; None where it is not tracing."""


def tracing() -> bool:
    """Whether ops are being traced by make_fx (and tools built on it) or torch.jit.trace.

    >>> tracing()
    False
    """
    if script_state() is not None:
        return True
    if None in (_mode, _proxy, _functional) or dispatch_modes() == 0:
        return False
    return _mode(_proxy) is not None or _mode(_functional) is not None


def modes_active() -> bool:
    """Whether a dispatch mode or a torch-function mode of the caller is active.

    >>> modes_active()
    False
    """
    return dispatch_modes() > 0 or function_modes() > 0


def in_plain_mode(work: Callable[[], T]) -> T:
    """Run `work` as C++ would: without autograd recording and outside of the caller's modes."""
    if not modes_active():
        return without_autograd(work)
    with _no_functions(), _no_dispatch():
        return without_autograd(work)


def outside_modes(work: Callable[[], T]) -> T:
    """Run `work` outside of all modes: no transform, trace, inference mode or default device.

    For values that are created once and cached, and for tensors created at import. All these modes are thread-local, so
    the work runs in a new thread.

    >>> with torch.inference_mode():
    ...     kept = outside_modes(lambda: torch.zeros(1))
    >>> kept.is_inference()
    False
    """
    done: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            done.append(work())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="gradmesh outside of modes")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return done[0]


_BATCH = "torch.autograd.grad(is_grads_batched=True) through a collective"
_enter_batch = required("torch._C._vmapmode_increment_nesting", _BATCH)
_leave_batch = required("torch._C._vmapmode_decrement_nesting", _BATCH)
_take_out = required("torch._remove_batch_dim", _BATCH)
_put_in = required("torch._add_batch_dim", _BATCH)

is_legacy_batched: Callable[[torch.Tensor], bool] = required(
    "torch._C._functorch.is_legacy_batchedtensor", "the backward of a collective"
)
"""Whether a tensor is batched by `torch.autograd.grad(is_grads_batched=True)` (legacy vmap)."""


def on_legacy_batch(x: torch.Tensor, work: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Run `work` on the unbatched tensor, with the batch as first dimension, and batch the result again."""
    if isinstance(_leave_batch, Missing):
        _leave_batch()  # before the level is changed
    level: int = _enter_batch() - 1
    _leave_batch()
    whole = _take_out(x, level, 0, 0)
    batched: torch.Tensor = _put_in(work(whole), 0, level)
    return batched
