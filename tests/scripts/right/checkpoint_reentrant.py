# about: reentrant checkpointing of a tensor-parallel block: the collective runs again in backward
# ranks: 2
# expect: none
# cut: up down
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.contiguous().clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        world, rank = dist.get_world_size(), dist.get_rank()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Parameter(torch.randn(2 * width, width).tensor_split(world)[rank].clone())
        self.down = nn.Parameter(torch.randn(width, 2 * width).tensor_split(world, dim=1)[rank].clone())

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(_Copy.apply(self.norm(x)) @ self.up.T)
        return x + _Reduce.apply(h @ self.down.T)


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    embed = nn.Embedding(9, 6)
    blocks = nn.ModuleList(Block(6) for _ in range(2))
    params = [*embed.parameters(), *blocks.parameters()]
    optimizer = torch.optim.AdamW(params, lr=1e-2)
    for step in range(2):
        tokens = torch.randint(0, 9, (7,))
        h = embed(tokens[:-1])
        for block in blocks:
            h = checkpoint(block, h, use_reentrant=True)
        loss = nn.functional.cross_entropy(h @ embed.weight.T, tokens[1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"step {step} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
