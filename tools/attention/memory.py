"""How much memory a step of attention takes above its inputs, by what the kernel of the machine says."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import torch

import gradmesh as gm
from tools.attention.ways import Case, step

__all__ = ["peaks"]


def peaks(case: Case, way: str) -> float:
    """The peak of forward and backward on this rank above its inputs, in MB.

    The inputs are the rank's part of the sequence, and the gradient of its result.

    Args:
        case: what is computed.
        way: how.
    """
    torch.set_num_threads(1)
    run = step(case, way)
    inputs = case.inputs()
    run(inputs)  # what is loaded and set up once, such as the memory that the ranks share
    return _peak(lambda: run(inputs))


def _peak(work: Callable[[], object]) -> float:
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    gm.barrier()
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    work()
    return (_status("VmHWM") - before) / 1024


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))
