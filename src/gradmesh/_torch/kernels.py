"""Kernels without a public name: attention with its logsumexp, memory filled with NaN, a profiler of all threads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from gradmesh._torch.names import find

_WITHOUT = "gradmesh.nn.ring_attention and ulysses_attention work in tiles of torch's public functions, which is slower"
_forward = find("torch.ops.aten._scaled_dot_product_flash_attention_for_cpu", without=_WITHOUT)
_backward = find("torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward", without=_WITHOUT)
_DTYPES = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})


def flash_takes(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the fused kernels can be used: CPU, equal feature sizes, no empty operand (which crashes the process)."""
    there = _forward is not None and _backward is not None and q.is_cpu and q.dtype in _DTYPES
    return there and k.shape[-1] == v.shape[-1] and min(q.numel(), k.numel()) > 0


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


_set = find(
    "torch._C._set_deterministic_algorithms",
    without="an audit imports torch's compiler to fill uninitialized memory, which takes seconds once",
)


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
    if _set is None:
        torch.use_deterministic_algorithms(on, warn_only=True)
    else:  # the public function imports the compiler, to configure it too
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
