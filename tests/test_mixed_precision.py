"""Random programs in mixed precision, compared with one process: autocast, loss scaling, bf16 parameters."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import gradmesh as gm
from tests import simulated_device as sd

Ranks = Callable[[int], Callable[..., list[Any]]]

ROWS, SIZE, SEEDS = 3, 2, range(24)
"""Rows of a rank, ranks, and programs."""
ALLOWED = 0.04
"""The largest error relative to the largest entry: a few roundings of bfloat16, of 2**-8 each."""


class Program:
    """A small network whose ranks have rows of the batch, drawn from a seed.

    Args:
        seed: of the program and its data.
        device: where it runs.
    """

    def __init__(self, seed: int, device: str) -> None:
        draw = random.Random(seed)
        self.device = device
        self.autocast = draw.random() < 0.6
        self.scale = draw.choice((1.0, 1024.0))
        self.dtype = draw.choice((torch.float32, torch.bfloat16))
        self.verbs = [draw.choice(("none", "mean", "gather", "scatter")) for _ in range(2)]
        draws = torch.Generator().manual_seed(seed)
        shapes = [(4, 6), (6, 6), (6, 2)]
        self.weights = [
            torch.randn(shape, generator=draws, device="cpu").to(self.dtype).to(device).requires_grad_()
            for shape in shapes
        ]
        self.x = torch.randn(SIZE * ROWS, 4, generator=draws, device="cpu").to(device)

    def run(self, rank: int | None) -> list[Tensor]:
        """The loss and the gradients of the parameters; rank None: of all rows, in one process."""
        x = self.x if rank is None else self.x[ROWS * rank : ROWS * (rank + 1)]
        x = x if self.autocast else x.to(self.dtype)
        alone = rank is None
        weights = (
            self.weights if alone else [gm.replicate(w, backward_dtype=torch.float32) for w in self.weights]
        )
        with torch.autocast(self.device, torch.bfloat16, enabled=self.autocast):
            for verb, w in zip(self.verbs, weights[:2], strict=True):
                x = torch.tanh(x @ w)
                if verb == "mean":  # of all rows
                    total = x.sum(0) if alone else gm.all_reduce(x.sum(0), dst=gm.R, comm_dtype=torch.float32)
                    x = x + total / (SIZE * ROWS)
                elif verb == "gather":
                    every = x if alone else gm.all_gather(x)
                    x = x * torch.sigmoid(every.mean())
                elif verb == "scatter" and not alone:  # a sum of shares, which each rank has
                    x = gm.reduce_scatter(gm.all_gather(x) / SIZE)
            y = x @ weights[2]
        loss = (y.float() ** 2).sum()
        if not alone:
            loss = gm.all_reduce(loss, dst=gm.I)
        scaler = torch.amp.GradScaler("cpu", init_scale=self.scale, enabled=self.device == "cpu")
        scaler.scale(loss).backward()
        scaler.unscale_(torch.optim.SGD(self.weights, lr=0.1))
        grads = [w.grad for w in self.weights]
        return [loss.detach().cpu(), *(g.float().cpu() for g in grads if g is not None)]


def on_ranks(device: str) -> list[list[Tensor]]:
    return [Program(seed, device).run(gm.rank()) for seed in SEEDS]


def compared(ranks: list[list[list[Tensor]]]) -> None:
    for seed in SEEDS:
        expected = Program(seed, "cpu").run(None)
        for found in ranks:
            assert len(found[seed]) == len(expected) == 4
            for got, right in zip(found[seed], expected, strict=True):
                far = (got - right).abs().max().item() / right.abs().max().item()
                assert far < ALLOWED, f"program {seed}: {far}"
        for got, other in zip(ranks[0][seed], ranks[1][seed], strict=True):
            assert torch.equal(got, other)


def test_random_programs_are_those_of_one_process(threads: Ranks) -> None:
    compared(threads(SIZE)(on_ranks, "cpu"))


def test_they_are_on_gloo_too(processes: Ranks) -> None:
    compared(processes(SIZE)(on_ranks, "cpu"))


@pytest.mark.parametrize("delay", [0.0, 0.002])
def test_they_are_on_a_device_too(delay: float, simulated: Ranks) -> None:
    compared(simulated(SIZE)(on_ranks, sd.NAME, delay=delay, default=False))
