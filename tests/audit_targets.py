"""Functions for the audit's tests, which ranks that are processes and the command can import."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import gradmesh as gm


class Doubled(torch.autograd.Function):
    """A sum whose backward overwrites what it is handed, and is twice too large."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.clone()
        dist.all_reduce(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        dist.all_reduce(grad)
        return 2 * grad


class NoJvp(torch.autograd.Function):
    """A correct Function without forward mode."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


def right() -> Any:
    return gm.all_gather, torch.randn(4, 3)


def wrong() -> Any:
    return Doubled.apply, torch.randn(4, 3)


def without_jvp() -> Any:
    return NoJvp.apply, torch.randn(2)


def broken() -> Any:
    return None


def raising() -> Any:
    raise ValueError("no data")


def refusing() -> Any:
    def fn(x: Tensor) -> Tensor:
        raise ValueError(f"rank {dist.get_rank()} cannot")

    return fn, torch.randn(3)


def _ends(x: Tensor) -> Tensor:
    os.kill(os.getpid(), signal.SIGKILL)
    return x


def ending() -> Any:
    return _ends, torch.randn(3)


class _EndsLater(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if grad.is_contiguous():
            return grad.clone()
        os.kill(os.getpid(), signal.SIGKILL)
        return grad


def ending_on_strides() -> Any:
    return _EndsLater.apply, torch.randn(4, 3)


def sleeping() -> Any:
    def fn(x: Tensor) -> Tensor:
        end = time.monotonic() + 60
        while time.monotonic() < end:  # in short sleeps, which end with a thread
            time.sleep(0.05)
        return x

    return fn, torch.randn(3)


def gathering(group: Any = None, parts: Any = None) -> Any:
    sizes = parts or [2] * dist.get_world_size(group)
    return (lambda x: gm.all_gather(x, group, sizes=sizes)), torch.randn(sizes[dist.get_rank(group)], 3)


class _FromFirst(torch.autograd.Function):
    """What the first rank has, as it lies in memory; the gradient is right."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.clone() if dist.get_rank() == 0 else torch.empty(x.shape, dtype=x.dtype)
        dist.broadcast(y, 0)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        total = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total * (dist.get_rank() == 0)


def memory_order() -> Any:
    return _FromFirst.apply, torch.randn(4, 3)


class _EndsOnGloo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if dist.get_backend() == "gloo" and not grad.is_contiguous():
            os.kill(os.getpid(), signal.SIGKILL)
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad)
        return grad


def ending_on_gloo() -> Any:
    return _EndsOnGloo.apply, torch.randn(4, 3)
