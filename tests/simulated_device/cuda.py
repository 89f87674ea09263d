"""The same for NVIDIA GPUs over NCCL: what `GRADMESH_TEST_DEVICE=cuda` selects.

Each rank has a GPU; ranks that are more than the GPUs share them, as `gradmesh.launch` has them do.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch

import gradmesh as gm

__all__ = ["NAME", "POOL", "captured", "count", "counted", "on_device", "why_not"]

NAME, POOL = "cuda", "cpu:gloo,cuda:nccl"


def count() -> int:
    """The number of GPUs here."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def why_not() -> str | None:
    """Why no rank can run here, as the reason of a skip; None: they can."""
    return None if count() else "needs an NVIDIA GPU"


def on_device(fn: Callable[..., Any], *args: Any, default: bool = True, **_: Any) -> Any:
    """Run a function on a rank with its GPU as the default device; its kernels are as late as they are."""
    torch.cuda.set_device(gm.rank() % count())
    with torch.device(f"cuda:{torch.cuda.current_device()}") if default else contextlib.nullcontext():
        try:
            return fn(*args)
        finally:
            torch.cuda.synchronize()


@contextlib.contextmanager
def captured() -> Iterator[torch.cuda.CUDAGraph]:
    """Capture the kernels of the block instead of running them."""
    graph = torch.cuda.CUDAGraph()
    # NCCL's own threads ask for the state of events meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        yield graph


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
