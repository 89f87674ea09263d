"""How long a step takes, all ways in turn, so that a slow moment of the machine meets all of them."""

from __future__ import annotations

import contextlib
import time

import torch

import gradmesh as gm
from gradmesh.verify import Link, delayed
from tools.attention.ways import Case, step


def times(case: Case, ways: tuple[str, ...], rounds: int, link: Link | None = None) -> dict[str, list[float]]:
    """The seconds of each step on this rank, by way."""
    torch.set_num_threads(1)
    inputs, found = case.inputs(), {way: [0.0] * 0 for way in ways}
    with contextlib.nullcontext() if link is None else delayed(link):
        for number in range(rounds + 1):
            for way in ways:
                run = step(case, way)
                gm.barrier()
                started = time.perf_counter()
                run(inputs)
                gm.barrier()
                if number:  # the first one is not counted
                    found[way].append(time.perf_counter() - started)
    return found
