# about: the weights of RMSNorms under sequence parallelism, written out, their gradients summed before the step
# ranks: 2
# expect: none
# cut: up down
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def gather_tokens(x: Tensor) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts)


def reduce_scatter_tokens(x: Tensor) -> Tensor:
    x = x.clone()
    dist.all_reduce(x)
    return x.chunk(dist.get_world_size())[dist.get_rank()].contiguous()


class GatherFromSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return gather_tokens(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return reduce_scatter_tokens(grad)


class ReduceScatterToSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return reduce_scatter_tokens(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return gather_tokens(grad)


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        return self.weight * (x * scale).to(x.dtype)


class Block(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        rank, world = dist.get_rank(), dist.get_world_size()
        self.norm = Norm(width)
        self.up = nn.Parameter(torch.randn(hidden, width).chunk(world)[rank] / width**0.5)
        self.down = nn.Parameter(torch.randn(width, hidden).chunk(world, dim=1)[rank] / hidden**0.5)

    def forward(self, x: Tensor) -> Tensor:
        h = GatherFromSequence.apply(self.norm(x))
        h = torch.relu(h @ self.up.T) @ self.down.T
        return x + ReduceScatterToSequence.apply(h)


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    blocks = nn.Sequential(Block(8, 16), Block(8, 16), Block(8, 16))
    optimizer = torch.optim.SGD(blocks.parameters(), lr=0.1)
    for step in range(3):
        tokens, target = torch.randn(8 * world, 8), torch.randn(8 * world, 8)
        out = blocks(tokens.chunk(world)[rank])
        loss = (out - target.chunk(world)[rank]).square().sum() / target.numel()
        optimizer.zero_grad()
        loss.backward()
        for block in blocks:
            dist.all_reduce(block.norm.weight.grad)
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        if rank == 0:
            print(f"step {step} loss {total.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
