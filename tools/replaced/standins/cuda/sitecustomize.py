"""GPUs that are the CPU, and NCCL that is Gloo, in each process of a test that asks for GPUs.

It shows that code runs and what it computes, and nothing about streams, kernels and memory of GPUs.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

GPUS = int(os.environ.get("STANDIN_GPUS", "8"))
_CPU = torch.device("cpu")
_MADE = "arange as_tensor empty empty_like empty_strided eye full full_like linspace load ones ones_like rand rand_like"
_MADE += " randint randint_like randn randn_like randperm scalar_tensor tensor zeros zeros_like"


def _on_cpu(x: Any) -> Any:
    on_gpu = (isinstance(x, str) and x.startswith("cuda")) or (
        isinstance(x, torch.device) and x.type == "cuda"
    )
    return _CPU if on_gpu else x


def _called_on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("pin_memory", None)
        for key in ("device", "map_location"):
            if type(kwargs.get(key)) is int:  # the number of a GPU
                kwargs[key] = _CPU
        return function(*map(_on_cpu, args), **{key: _on_cpu(x) for key, x in kwargs.items()})

    return call


def _moved(function: Callable[..., Any]) -> Callable[..., Any]:
    moved = _called_on_cpu(function)
    return functools.wraps(function)(
        lambda self, *args, **kwargs: moved(self, *[_CPU if type(x) is int else x for x in args], **kwargs)
    )


def _over_gloo(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        args = tuple("gloo" if isinstance(x, str) and "nccl" in x else x for x in args)
        if "nccl" in str(kwargs.get("backend", "")):
            kwargs["backend"] = "gloo"
        for gone in ("device_id", "pg_options"):
            kwargs.pop(gone, None)
        return function(*args, **kwargs)

    return call


class _Stream:
    """A stream or an event: all work is done at once."""

    cuda_stream, device = 0, _CPU

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: True if name == "query" else 0.0 if name == "elapsed_time" else None


class _Generator(torch.Generator):
    """Of random numbers."""

    def __new__(cls, device: Any = "cpu") -> _Generator:
        return super().__new__(cls, _on_cpu(device))


def _silent() -> Callable[..., None]:
    """A function for each name: torch.compile tells them apart by their objects."""
    return lambda *args, **kwargs: None


_PROPERTIES = SimpleNamespace(name="CPU", major=8, minor=0, total_memory=1 << 33, multi_processor_count=1)
_CUDA: dict[str, Any] = {
    "is_available": lambda: True,
    "is_initialized": lambda: True,
    "is_bf16_supported": lambda *_: True,
    "device_count": lambda: GPUS,
    "current_device": lambda: 0,
    "get_device_name": lambda *_: "CPU",
    "get_device_capability": lambda *_: (8, 0),
    "get_device_properties": lambda *_: _PROPERTIES,
    "get_rng_state": lambda *_: torch.get_rng_state(),
    "set_rng_state": lambda state, *_: torch.set_rng_state(state),
    "default_generators": (torch.default_generator,) * GPUS,
    "mem_get_info": lambda *_: (1 << 33, 1 << 33),
    "memory_stats": lambda *_: {},
    "device": lambda *_: nullcontext(),
    "stream": lambda *_: nullcontext(),
    "current_stream": lambda *_: _Stream(),
    "default_stream": lambda *_: _Stream(),
    "Stream": type("Stream", (_Stream,), {}),
    "Event": type("Event", (_Stream,), {}),
}
_ZERO = "memory_allocated max_memory_allocated memory_reserved max_memory_reserved"
_SILENT = (
    "set_device synchronize empty_cache manual_seed manual_seed_all reset_peak_memory_stats ipc_collect init"
)


def _install() -> None:
    for name in _MADE.split():
        setattr(torch, name, _called_on_cpu(getattr(torch, name)))
    for name in ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros"):
        setattr(Tensor, name, _called_on_cpu(getattr(Tensor, name)))
    for kind in (Tensor, nn.Module):
        kind.to = _moved(kind.to)  # type: ignore[method-assign]
        kind.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    Tensor.pin_memory = lambda self, *args: self  # type: ignore[method-assign]
    for name, value in _CUDA.items():
        setattr(torch.cuda, name, value)
    for name in _ZERO.split():
        setattr(torch.cuda, name, lambda *_, **__: 0)
    for name in _SILENT.split():
        setattr(torch.cuda, name, _silent())
    for name in ("init_process_group", "new_group"):
        setattr(dist, name, _over_gloo(getattr(dist, name)))
    torch.Generator = _Generator  # type: ignore[misc]
    barrier = dist.barrier
    dist.barrier = lambda group=None, **_: barrier(group)
    dist.is_nccl_available = lambda: True
    torch.jit.script = lambda x, *_, **__: x  # it compiles no functions of Python


_install()
