"""A profiler that sees every thread of the process; torch's own sees the one that starts it."""

from __future__ import annotations

from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from gradmesh._torch.names import find

__all__ = ["profiler_of_all_threads"]

_config = find(
    "torch.profiler._ExperimentalConfig",
    without="a merged profile shows of each process the thread that began it, so of ranks on threads one",
)


def profiler_of_all_threads() -> profile:
    """One that was not started yet: with the calls that a thread of the library makes, and with ranks on threads.

    Two profilers at once in one process, each of its own thread, end in a segmentation fault (torch 2.13).
    """
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    every: dict[str, Any] = {}
    if _config is not None:
        every["experimental_config"] = _config(profile_all_threads=True)
    return profile(activities=activities, acc_events=True, **every)
