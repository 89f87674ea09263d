# about: experts whose hidden units are cut over ranks; tokens in sequence parallel, gate and biases summed
# ranks: 2
# expect: none
# cut: up down
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

EXPERTS, WIDTH, HIDDEN = 3, 6, 8


def gather(x: Tensor) -> Tensor:
    out = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(out, x.contiguous())
    return torch.cat(out)


def reduce_scatter(x: Tensor) -> Tensor:
    x = x.clone()
    dist.all_reduce(x)
    return x.chunk(dist.get_world_size())[dist.get_rank()].contiguous()


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return gather(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return reduce_scatter(grad)


class ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return reduce_scatter(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return gather(grad)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        rank, world = dist.get_rank(), dist.get_world_size()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN).chunk(world, -1)[rank].clone())
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH).chunk(world, 1)[rank].clone())
        self.bias = nn.Parameter(torch.randn(EXPERTS, WIDTH) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        probs = self.gate(x).softmax(-1)
        tokens = Gather.apply(x)
        out = torch.einsum("th,ehk,ekw->tew", tokens, F.relu(self.up), self.down)
        out = ReduceScatter.apply(out) + self.bias
        return x + torch.einsum("te,tew->tw", probs, out)


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Experts()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        x, y = torch.randn(4 * world, WIDTH), torch.randn(4 * world, WIDTH)
        out = model(x.chunk(world)[rank])
        loss = (out - y.chunk(world)[rank]).square().sum() / len(x)
        optimizer.zero_grad()
        loss.backward()
        for p in (model.gate.weight, model.bias):
            dist.all_reduce(p.grad)
        optimizer.step()
        if rank == 0:
            print(f"step {step} part of the loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
