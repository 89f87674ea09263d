"""Training on W ranks follows the trajectory of one process, step by step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CyclicLR

import gradmesh as gm

Threads = Callable[[int], Callable[..., list[Any]]]
STEPS, ROWS = 12, 24

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
}


def model() -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 3)
    return net


def batch(step: int) -> Tensor:
    return torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def contrast(rows: Tensor, everything: Tensor, first: int) -> Tensor:
    """The sum of the rows' losses against every row, as in contrastive learning."""
    logits = rows @ everything.roll(1, 1).T
    labels = torch.arange(first, first + len(rows))
    return nn.functional.cross_entropy(logits, labels, reduction="sum")


def single_loss(net: nn.Module, x: Tensor) -> Tensor:
    y = net(x)
    return contrast(y, y, 0) / ROWS


def distributed_loss(net: nn.Module, x: Tensor) -> Tensor:
    """This rank's share of the same loss: its own rows, against the rows of all ranks."""
    parameters = {name: gm.replicate(p) for name, p in net.named_parameters()}
    y = torch.func.functional_call(net, parameters, (gm.shard(x),))
    first = sum(gm.sizes(y)[: gm.axis().rank])
    return contrast(y, gm.all_gather(y, sizes="auto"), first) / ROWS


def train(optimizer: str, loss: Callable[[nn.Module, Tensor], Tensor]) -> list[Tensor]:
    net = model()
    optim = OPTIMIZERS[optimizer](list(net.parameters()))
    schedule = CyclicLR(optim, base_lr=0.01, max_lr=0.05, step_size_up=3, cycle_momentum=False)
    path = []
    for step in range(STEPS):
        optim.zero_grad()
        loss(net, batch(step)).backward()
        optim.step()
        schedule.step()
        path.append(torch.cat([p.detach().reshape(-1) for p in net.parameters()]).clone())
    return path


@pytest.mark.parametrize("size", [2, 4, 5])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_ranks_follow_the_single_process_step_by_step(optimizer: str, size: int, threads: Threads) -> None:
    expected = train(optimizer, single_loss)
    assert (expected[0] - expected[-1]).abs().max() > 1e-2
    for path in threads(size)(train, optimizer, distributed_loss):
        for step, (got, want) in enumerate(zip(path, expected, strict=True)):
            torch.testing.assert_close(got, want, rtol=0, atol=1e-12, msg=lambda m, s=step: f"step {s}: {m}")


def test_a_gather_of_the_wrong_convention_leaves_the_trajectory(threads: Threads) -> None:
    """The comparison can fail: slicing where losses differ is off from the first step."""

    def wrong(net: nn.Module, x: Tensor) -> Tensor:
        parameters = {name: gm.replicate(p) for name, p in net.named_parameters()}
        y = torch.func.functional_call(net, parameters, (gm.shard(x),))
        return contrast(y, gm.all_gather(y, dst=gm.I), gm.axis().rank * len(y)) / ROWS

    expected = train("SGD", single_loss)
    for path in threads(2)(train, "SGD", wrong):
        assert (path[0] - expected[0]).abs().max() > 1e-4


@pytest.mark.processes
def test_processes_follow_the_single_process(processes: Threads) -> None:
    expected = train("Adam", single_loss)
    for path in processes(4)(train, "Adam", distributed_loss):
        torch.testing.assert_close(path[-1], expected[-1], rtol=0, atol=1e-12)
