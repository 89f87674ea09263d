"""How much memory a step of attention takes above its inputs, by what the kernel of the machine says."""

from __future__ import annotations

import torch

import gradmesh as gm
from benchmarks.peak import peak
from tools.attention.ways import Case, step


def peaks(case: Case, way: str) -> float:
    """The peak of forward and backward on this rank above its inputs, in MB.

    The inputs are the rank's part of the sequence, and the gradient of its result.
    """
    torch.set_num_threads(1)
    run = step(case, way)
    inputs = case.inputs()
    run(inputs)  # what is loaded and set up once, such as the memory that the ranks share
    return peak(lambda: run(inputs), gm.barrier) / 2**20
