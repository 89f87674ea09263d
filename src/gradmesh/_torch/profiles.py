"""A profiler for all threads of the process; torch's default profiles only the thread that starts it."""

from __future__ import annotations

from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from gradmesh._torch.names import find

__all__ = ["profiler_of_all_threads"]

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
