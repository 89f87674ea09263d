"""The memory that a rank takes for a forward and backward of a layer, above its leaves."""

from __future__ import annotations

from typing import Any

import torch

import gradmesh as gm
from benchmarks.peak import peak
from tools.layers.case import Case, layer_of, parts_of, whole_of


def megabytes(case: Case) -> float:
    """On a rank that is a process: the peak above what is there when the leaves are, results and gradients in it."""
    torch.set_num_threads(1)
    options: dict[str, Any] = {"allow_unused": True, "materialize_grads": True}
    ranks, (n, s) = gm.world_size(), case.large

    def step(n: int, s: int) -> Any:
        sizes = (n // ranks,) * ranks
        own = [each.requires_grad_() for each in parts_of(case, whole_of(case, n, s, torch.float32), sizes)]

        layer = layer_of(case, own, sizes)

        def run() -> Any:
            y = layer(*own)
            return torch.autograd.grad(y.square().sum(), own, **options)

        return run

    step(ranks * 8, 1)()  # what is loaded and set up once
    return peak(step(n, s), gm.barrier) / 2**20
