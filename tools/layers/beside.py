"""Time and memory of a step beside torch's own tensor parallel layers (DTensor) and the dense model on one process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy

import gradmesh as gm
from benchmarks.peak import peak

RANKS = 2

TOKENS, WIDTH, HIDDEN, WORDS = 512, 256, 1024, 16_384

Step = Callable[[], float]
"""Forward, backward, and the value of the loss."""


@dataclass(frozen=True)
class Result:
    """Of one way on one rank."""

    seconds: list[float]  # of each step
    megabytes: float  # the peak of a step above what the model and the batch take
    loss: float  # its value

    @property
    def median(self) -> float:
        """Of the seconds."""
        return statistics.median(self.seconds)


def _batch() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    return torch.randn(TOKENS, WIDTH, generator=draw), torch.randint(0, WORDS, (TOKENS,), generator=draw)


def _drawn(net: nn.Module) -> nn.Module:
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for value in net.parameters():
            value.copy_(torch.randn(value.shape, generator=draw) * value.shape[-1] ** -0.5)
    return net


def _step(net: nn.Module, loss: Callable[[], Tensor]) -> Step:
    def step() -> float:
        net.zero_grad()
        value = loss()
        value.backward()
        return value.item()

    return step


def _pair() -> dict[str, Step]:
    """Two linear layers, cut by outputs and by inputs."""
    x, _ = _batch()

    def net() -> nn.Module:
        return _drawn(nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH)))

    def squares(made: nn.Module) -> Step:
        return _step(made, lambda: made(x).square().mean())

    ways = {"dense, each rank": squares(net())}
    if gm.world_size() > 1:
        theirs = parallelize_module(net(), _mesh(), {"0": ColwiseParallel(), "2": RowwiseParallel()})
        ways |= {
            "gradmesh": squares(gm.nn.tensor_parallel(net(), {"0": "column", "2": "row"})),
            "DTensor": squares(theirs),
        }
    return ways


def _head() -> dict[str, Step]:
    """A head over the vocabulary, and its loss."""
    x, target = _batch()

    def head() -> Any:
        return _drawn(nn.Sequential(nn.Linear(WIDTH, WORDS, bias=False)))

    dense = head()
    ways = {"dense, each rank": _step(dense, lambda: cross_entropy(dense(x), target))}
    if gm.world_size() > 1:
        ours, tiled = (gm.nn.tensor_parallel(head(), {"0": "column"}) for _ in range(2))
        sizes = ours[0].cuts["weight"].sizes  # type: ignore[index,union-attr]
        layout = {
            "0": ColwiseParallel(input_layouts=Replicate(), output_layouts=Shard(-1), use_local_output=False)
        }
        theirs = parallelize_module(head(), _mesh(), layout)

        def parallel_loss() -> float:
            theirs.zero_grad()
            with loss_parallel():
                value = cross_entropy(theirs(x), target)
                value.backward()
            return float(value.full_tensor() if hasattr(value, "full_tensor") else value)

        ways |= {
            "gradmesh, own logits": _step(
                ours, lambda: gm.nn.vocab_parallel_cross_entropy(ours(x), target, sizes=sizes)
            ),
            "gradmesh, tiles": _step(
                tiled,
                lambda: gm.nn.linear_cross_entropy(x, tiled[0].weight, target, sizes=sizes, tile=64),  # type: ignore[index,union-attr]
            ),
            "DTensor": parallel_loss,
        }
    return ways


def _mesh() -> Any:
    return init_device_mesh("cpu", (gm.world_size(),))


MODELS: dict[str, Callable[[], dict[str, Step]]] = {"two linear layers": _pair, "head and loss": _head}


def measured(model: str, repeats: int) -> dict[str, Result]:
    """On each rank that is a process: every way of a model, step by step in turn."""
    torch.set_num_threads(1)
    ways = MODELS[model]()
    losses = {name: step() for name, step in ways.items()}
    weights = {name: peak(step, gm.barrier) / 2**20 for name, step in ways.items()}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, step in ways.items():
            gm.barrier()
            started = time.perf_counter()
            step()
            gm.barrier()
            seconds[name].append(time.perf_counter() - started)
    return {name: Result(seconds[name], weights[name], losses[name]) for name in ways}
