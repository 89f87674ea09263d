# about: each rank's features are divided by their own root mean square, and each rank has a scale for its features
# ranks: 2
# expect: none
# cut: up down scale
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

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


class Mixer(nn.Module):
    """A state-space layer's gate: groups of features, which the ranks share out, are normed by themselves."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        rank, world = dist.get_rank(), dist.get_world_size()
        self.up = nn.Parameter(torch.randn(hidden, width).chunk(world)[rank] / width**0.5)
        self.down = nn.Parameter(torch.randn(width, hidden).chunk(world, dim=1)[rank] / hidden**0.5)
        self.scale = nn.Parameter(torch.ones(hidden // world))

    def forward(self, x: Tensor) -> Tensor:
        h = Copy.apply(x) @ self.up.T
        h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6) * self.scale
        return x + Sum.apply(torch.relu(h) @ self.down.T)


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(Mixer(8, 16), Mixer(8, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        x, target = torch.randn(8, 8), torch.randn(8, 8)
        loss = (model(x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"step {step} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
