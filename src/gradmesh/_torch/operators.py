"""Operators in a dispatch mode: their arguments, what they write, tensor versions. Kernels without a public name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils.weak import WeakIdKeyDictionary as WeakTensors

from gradmesh._torch.names import Attribute, find, getter, refuse, required

if TYPE_CHECKING:
    from torch.utils._python_dispatch import TorchDispatchMode as DispatchMode

__all__ = [
    "DispatchMode",
    "WeakTensors",
    "arguments",
    "arguments_of",
    "base_of",
    "dispatched_name",
    "fill_fresh_memory",
    "flash_backward",
    "flash_forward",
    "flash_takes",
    "group_behind",
    "is_random",
    "is_view",
    "local_part",
    "need_dispatch",
    "profiler_of_all_threads",
    "reduction_of",
    "version_of",
    "written",
]

_MODE = "torch.utils._python_dispatch.TorchDispatchMode"
_SCHEMA = "torch.ops.aten.add.Tensor._schema"
_UNBOX = "torch._C._distributed_c10d.ProcessGroup.unbox"
_NO_TYPES = "gradmesh.typed raises"
_mode, _schema = find(_MODE, without=_NO_TYPES), find(_SCHEMA, without=_NO_TYPES)
_unbox = find(
    _UNBOX,
    without="gradmesh.typed treats results of raw collectives as new tensors and infers their types from values",
)

if not TYPE_CHECKING:
    DispatchMode = object if _mode is None else _mode


def need_dispatch() -> None:
    """Raise if dispatch modes or operator schemas are not available.

    Raises:
        TorchVersionError: this torch lacks them.
    """
    if _mode is None or _schema is None:
        refuse("types of tensors", _MODE, _SCHEMA)


@functools.cache
def arguments_of(func: Any) -> tuple[tuple[str, bool], ...]:
    """The arguments of an operator: name, and whether the operator writes to it.

    >>> arguments_of(torch.ops.aten.relu_.default)
    (('self', True),)
    """
    return tuple(
        (arg.name, arg.alias_info is not None and arg.alias_info.is_write) for arg in func._schema.arguments
    )


@functools.cache
def dispatched_name(func: Any) -> tuple[str, str]:
    """The namespace and the name of an operator, without the overload.

    >>> dispatched_name(torch.ops.aten.add.Tensor)
    ('aten', 'add')
    """
    space, name = func._schema.name.split("::")
    return space, name


_version = getter("torch._C.TensorBase._version", "gradmesh.typed")


def version_of(x: Tensor) -> int:
    """The version counter of a tensor; -1 if it has none."""
    try:
        version: int = _version(x)
    except RuntimeError:  # an inference tensor
        return -1
    return version


base_of: Callable[[Tensor], Tensor | None] = getter("torch._C.TensorBase._base", "gradmesh check")
"""The tensor that a tensor is a view of, or None."""

is_view: Callable[[Tensor], bool] = required("torch._C.TensorBase._is_view", "gradmesh check")
"""Whether a tensor is a view."""


_LOCAL = Attribute("torch.distributed.tensor.DTensor._local_tensor", "gradmesh check")


def local_part(x: Any) -> Any:
    """This rank's part of a DTensor, as the same object each time; any other object itself.

    `to_local` is an operation, which modes that watch a program see.
    """
    return _LOCAL.of(x, x)


def group_behind(boxed: Any) -> torch.distributed.ProcessGroup | None:
    """The process group argument of a c10d operator; None if it cannot be determined."""
    if _unbox is None:
        return None
    try:
        group: torch.distributed.ProcessGroup = _unbox(boxed)
    except (RuntimeError, TypeError):
        return None
    return group


def arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of an operator call by name."""
    return {**dict(zip((name for name, _ in arguments_of(func)), args, strict=False)), **kwargs}


@functools.cache
def written(func: Any) -> frozenset[str]:
    """The names of the arguments that an operator writes to."""
    return frozenset(name for name, is_written in arguments_of(func) if is_written)


@functools.cache
def is_random(func: Any) -> bool:
    """Whether an operator draws from a generator."""
    return torch.Tag.nondeterministic_seeded in func.tags


_REDUCTIONS = {
    int(getattr(dist.ReduceOp, name)): name.lower()
    for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX")
    if dist.is_available()
}


def reduction_of(boxed: Any) -> str:
    """The reduction of a c10d operator, in lower case; "other" if it is not a standard one."""
    return _REDUCTIONS.get(int(boxed.op()), "other")


_FLASH = "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu"
_forward = required(_FLASH, "attention over a sharded sequence")
_backward = required(f"{_FLASH}_backward", "attention over a sharded sequence")
_DTYPES = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})


def flash_takes(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the fused kernels can be used: CPU, equal feature sizes, no empty operand (which crashes the process)."""
    supported = q.is_cpu and q.dtype in _DTYPES
    return supported and k.shape[-1] == v.shape[-1] and min(q.numel(), k.numel()) > 0


def flash_forward(q: Tensor, k: Tensor, v: Tensor, diagonal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Attention and the logsumexp of each row's scores.

    Args:
        q: (batch, heads, rows, features).
        k: (batch, heads, keys, features).
        v: the same.
        diagonal: whether row i attends only to keys up to i (causal).
        scale: the scale of the scores.

    >>> x = torch.zeros(1, 1, 4, 2)
    >>> flash_forward(x, x, x, False, 1.0)[1].exp()
    tensor([[[4., 4., 4., 4.]]])
    """
    out, lse = _forward(*map(_in_rows, (q, k, v)), 0.0, diagonal, scale=scale)
    return out, lse


def flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, diagonal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v; `out` and `lse` may include more keys than `k` and `v`."""
    operands = map(_in_rows, (grad, q, k, v, out))
    dq, dk, dv = _backward(*operands, lse, 0.0, diagonal, scale=scale)
    return dq, dk, dv


def _in_rows(x: Tensor) -> Tensor:
    """The tensor with contiguous, non-overlapping rows; the kernels misread other strides."""
    return x if x.stride(-1) == 1 and x.stride(-2) >= x.shape[-1] else x.contiguous()


# The public function imports the compiler, to configure it too, which takes seconds.
_set = required("torch._C._set_deterministic_algorithms", "gm.verify.audit")


def fill_fresh_memory(on: bool) -> bool:
    """Switch filling of uninitialized memory (torch.empty) with NaN on or off, for the whole process.

    torch does this while deterministic algorithms are enabled, unless `torch.utils.deterministic` disables it.

    Returns:
        Whether they were enabled before; if so, nothing is changed.
    """
    before = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    if before and not warns:
        return True
    _set(on, warn_only=True)
    return before


_config = find(
    "torch.profiler._ExperimentalConfig",
    without="a profile contains only one thread of each process, so only one of several thread ranks",
)


def profiler_of_all_threads() -> profile:
    """A profiler, not started, that includes the library's threads and all thread ranks.

    Two concurrent profilers in one process cause a segmentation fault (torch 2.13).
    """
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    every: dict[str, Any] = {}
    if _config is not None:
        every["experimental_config"] = _config(profile_all_threads=True)
    return profile(activities=activities, acc_events=True, **every)
