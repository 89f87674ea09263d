# about: stochastic depth on an activation that all ranks should have alike, drawn by each rank for itself
# ranks: 2
# expect: GM302
# twin: dropout_tracked
# cut: up down
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class OwnRandomness:
    """A second random state that differs from rank to rank."""

    def __init__(self, seed: int) -> None:
        self.state = torch.Generator().manual_seed(seed + dist.get_rank()).get_state()

    @contextmanager
    def fork(self) -> Iterator[None]:
        outer = torch.get_rng_state()
        torch.set_rng_state(self.state)
        yield
        self.state = torch.get_rng_state()
        torch.set_rng_state(outer)


class MLP(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        rank, world = dist.get_rank(), dist.get_world_size()
        self.up = nn.Parameter(torch.randn(hidden, width).chunk(world)[rank].clone())
        self.down = nn.Parameter(torch.randn(width, hidden).chunk(world, 1)[rank].clone())
        self.inner, self.outer = nn.Dropout(0.2), nn.Dropout(0.2)
        self.own = OwnRandomness(2718)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(Copy.apply(x) @ self.up.T)
        with self.own.fork():
            h = self.inner(h)
        out = self.outer(Sum.apply(h @ self.down.T))
        with self.own.fork():
            keep = (torch.rand(len(x), 1) < 0.8).to(x.dtype) / 0.8  # <- here
        return x + keep * out  # <- here


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), MLP(8, 32), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(3):
        x, y = torch.randn(6, 4), torch.randint(0, 2, (6,))
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"step {step} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
