"""The caller's differentiation and dispatch modes, and how kernels leave them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

import torch
from torch.autograd import forward_ad

from gradmesh._torch.levels import level_is_known
from gradmesh._torch.names import find, refuse

__all__ = [
    "UNNUMBERED",
    "dispatch_modes",
    "forward_level_open",
    "functorch_active",
    "in_function",
    "in_plain_mode",
    "is_legacy_batched",
    "modes_active",
    "on_legacy_batch",
    "only_vmap_active",
    "outside_modes",
    "tracing",
    "tracing_script",
    "transforms_active",
    "without_autograd",
]

T = TypeVar("T")

_functorch_active = find(
    "torch._C._are_functorch_transforms_active",
    without="a torch.func transform is detected by an operation that raises inside of one, which takes longer",
)
if level_is_known:

    def forward_level_open() -> bool:
        """Whether a forward-mode level is open."""
        return forward_ad._current_level >= 0

else:

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def forward_level_open() -> bool:
        """Whether a forward-mode level is open: without one, `make_dual` raises."""
        try:
            forward_ad.make_dual(torch.zeros(()), torch.zeros(()))
        except RuntimeError:
            return False
        return True


if _functorch_active is not None:

    def functorch_active() -> bool:
        """Whether a torch.func transform is running."""
        active: bool = _functorch_active()
        return active

else:

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def functorch_active() -> bool:
        """Whether a torch.func transform is running: inside of one, `requires_grad_` raises."""
        try:
            torch.zeros(()).requires_grad_()
        except RuntimeError:
            return True
        return False


if level_is_known and _functorch_active is not None:

    def transforms_active() -> bool:
        """Whether a torch.func transform or a forward-mode level is active.

        >>> transforms_active()
        False
        """
        return _functorch_active() or forward_ad._current_level >= 0

else:

    def transforms_active() -> bool:
        """Whether a torch.func transform or a forward-mode level is active."""
        return functorch_active() or forward_level_open()


_NO_VMAP = "every torch.func transform is treated as a derivative, so that vmap inside ordered() raises"
_interpreters = find("torch._C._functorch.get_interpreter_stack", without=_NO_VMAP)
_vmap = find("torch._C._functorch.TransformType.Vmap", without=_NO_VMAP)


def only_vmap_active() -> bool:
    """Whether no torch.func transform other than vmap is running."""
    if _interpreters is None or _vmap is None:
        return not functorch_active()
    return all(layer.key() == _vmap for layer in _interpreters() or [])


_KERNELS_RECORD = "forward-mode AD may record the kernels of raw collectives of gradmesh's backends"
UNNUMBERED = "mispaired backward calls of a Function that calls verbs in its backward are not detected"
_set_grad = find(
    "torch._C._set_grad_enabled", without="grad mode is switched by torch.no_grad, which takes longer"
)
_forward_on = find("torch._C._is_fwd_grad_enabled", without=f"{_KERNELS_RECORD}; {UNNUMBERED}")
_set_forward = find("torch._C._set_fwd_grad_enabled", without=_KERNELS_RECORD)

if None in (_set_grad, _forward_on, _set_forward):

    def without_autograd(work: Callable[[], T]) -> T:
        """Run `work` without backward-mode recording, and without forward mode if that is supported."""
        forward = _forward_on() if _forward_on is not None and _set_forward is not None else None
        if forward:
            _set_forward(False)
        try:
            with torch.no_grad():
                return work()
        finally:
            if forward:
                _set_forward(True)

else:

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


if _forward_on is None:

    def in_function() -> bool:
        """False, as it cannot be determined."""
        return False

else:

    def in_function() -> bool:
        """Whether the caller runs in the forward of an autograd Function, where torch disables both modes.

        >>> in_function()
        False
        """
        return not (torch.is_grad_enabled() or _forward_on() or torch.is_inference_mode_enabled())


def _perhaps_one() -> int:
    """Fallback: assume one dispatch mode is active."""
    return 1


_TAKES_LONGER = "kernels of gradmesh's backends always disable the caller's modes, which takes longer"
_RUNS_ONCE = "make_fx and torch.jit.trace record the result of a collective as a constant"
_MODES_SEE = "the caller's modes intercept the kernels of gradmesh's backends"
dispatch_modes = find("torch._C._len_torch_dispatch_stack", without=_TAKES_LONGER) or _perhaps_one
_function_modes = find("torch._C._len_torch_function_stack", without=_TAKES_LONGER) or _perhaps_one
_no_functions = find("torch._C.DisableTorchFunction", without=_MODES_SEE) or contextlib.nullcontext
_no_dispatch = (
    find("torch.utils._python_dispatch._disable_current_modes", without=_MODES_SEE) or contextlib.nullcontext
)


_mode = find("torch._C._get_dispatch_mode", without=_RUNS_ONCE)
_proxy = find("torch._C._TorchDispatchModeKey.PROXY", without=_RUNS_ONCE)
_functional = find("torch._C._TorchDispatchModeKey.FUNCTIONAL", without=_RUNS_ONCE)
_jit = find("torch._C._get_tracing_state", without=_RUNS_ONCE)


def tracing() -> bool:
    """Whether ops are being traced by make_fx (and tools built on it) or torch.jit.trace.

    >>> tracing()
    False
    """
    if tracing_script():
        return True
    if None in (_mode, _proxy, _functional) or dispatch_modes() == 0:
        return False
    return _mode(_proxy) is not None or _mode(_functional) is not None


def tracing_script() -> bool:
    """Whether torch.jit.trace is tracing.

    >>> tracing_script()
    False
    """
    return _jit is not None and _jit() is not None


def modes_active() -> bool:
    """Whether a dispatch mode or a torch-function mode of the caller is active.

    >>> modes_active()
    False
    """
    return dispatch_modes() > 0 or _function_modes() > 0


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


_NO_BATCH = "torch.autograd.grad(is_grads_batched=True) through a collective raises"
_BATCHED = "torch._C._functorch.is_legacy_batchedtensor"
_BATCHES = (
    "torch._C._vmapmode_increment_nesting",
    "torch._C._vmapmode_decrement_nesting",
    "torch._remove_batch_dim",
    "torch._add_batch_dim",
)
_batched = find(_BATCHED, without=_NO_BATCH)
_enter_batch, _leave_batch, _take_out, _put_in = [find(path, without=_NO_BATCH) for path in _BATCHES]


def _batch_level() -> int:
    """The nesting level of legacy vmap on the calling thread."""
    if _enter_batch is None or _leave_batch is None:
        refuse("batched gradients of a collective", *_BATCHES)
    level: int = _enter_batch() - 1
    _leave_batch()
    return level


if _batched is not None:

    def is_legacy_batched(x: torch.Tensor) -> bool:
        """Whether `x` is batched by `torch.autograd.grad(is_grads_batched=True)` (legacy vmap)."""
        batched: bool = _batched(x)
        return batched

elif None in (_enter_batch, _leave_batch):

    def is_legacy_batched(x: torch.Tensor) -> bool:  # noqa: ARG001
        """False, as it cannot be determined; torch raises for such a tensor."""
        return False

else:

    def is_legacy_batched(x: torch.Tensor) -> bool:  # noqa: ARG001
        """False outside of legacy vmap; inside it raises, because batched tensors cannot be recognized."""
        if _batch_level() > 0:
            refuse("batched gradients of a collective", _BATCHED)
        return False


def on_legacy_batch(x: torch.Tensor, work: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Run `work` on the unbatched tensor, with the batch as first dimension, and batch the result again."""
    if _take_out is None or _put_in is None:
        refuse("batched gradients of a collective", *_BATCHES)
    level = _batch_level()
    whole = _take_out(x, level, 0, 0)
    batched: torch.Tensor = _put_in(work(whole), 0, level)
    return batched
