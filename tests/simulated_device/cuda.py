"""The same for NVIDIA GPUs, one for each rank, over NCCL: what `GRADMESH_TEST_DEVICE=cuda` selects."""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch

import gradmesh as gm

__all__ = ["NAME", "POOL", "counted", "on_device", "why_not"]

NAME, POOL = "cuda", "cpu:gloo,cuda:nccl"


def why_not(ranks: int = 1) -> str | None:
    """Why so many ranks cannot run here, as the reason of a skip; None: they can."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return None if ranks <= count else f"needs {ranks} NVIDIA GPUs, and there are {count}"


def on_device(fn: Callable[..., Any], *args: Any, default: bool = True, **_: Any) -> Any:
    """Run a function on a rank with its GPU as the default device; its kernels are as late as they are."""
    torch.cuda.set_device(gm.rank())
    with torch.device(f"cuda:{gm.rank()}" if default else "cpu"):
        try:
            return fn(*args)
        finally:
            torch.cuda.synchronize()


@contextlib.contextmanager
def counted() -> Iterator[Counter[tuple[str, str]]]:
    """Count the times that the host waits for the GPU in the block, by torch's own warnings of it."""
    found: Counter[tuple[str, str]] = Counter()
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for each in heard:
        if "synchronizing CUDA operation" in str(each.message):
            found["synchronize", f"{each.filename}:{each.lineno}"] += 1
