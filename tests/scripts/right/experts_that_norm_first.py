# about: each rank's expert begins with a norm of its own, behind an exchange of tokens
# ranks: 2
# expect: none
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x.contiguous())
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return Exchange.forward(ctx, grad)


class Expert(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.scale
        return self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.shared = nn.ModuleList([nn.Linear(width, width), nn.Linear(width, width)])
        torch.manual_seed(100 + dist.get_rank())
        self.expert = Expert(width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.shared[0](x)
        return self.shared[1](h + Exchange.apply(self.expert(Exchange.apply(h))))


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Model(8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1)
    for step in range(3):
        x, target = torch.randn(world, 4, 8)[rank], torch.randn(world, 4, 8)[rank]
        loss = (model(x) - target).square().sum() / (4 * world)
        optimizer.zero_grad()
        loss.backward()
        for p in model.shared.parameters():
            dist.all_reduce(p.grad)
        optimizer.step()
        print(f"step {step} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
