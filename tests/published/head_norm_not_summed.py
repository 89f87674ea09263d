# about: a norm's weight is shared by heads that are sharded across ranks, and its gradient is summed with sequence parallelism only
# ranks: 2
# expect: GM101
# report: NVIDIA/Megatron-LM#7452 (11)
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


class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    sequence_parallel = False
    torch.manual_seed(0)
    embed, norm = nn.Linear(8, 8), nn.RMSNorm(3)
    nn.init.normal_(norm.weight, 1.0, 0.3)
    value, gate, out = (nn.Parameter((torch.randn(4, 8, 3) / 2).chunk(world)[rank].clone()) for _ in range(3))
    optimizer = torch.optim.SGD([*embed.parameters(), *norm.parameters(), value, gate, out], lr=0.1)
    for _ in range(3):
        x, y = torch.randn(5, 8), torch.randn(5, 8)
        h = Copy.apply(embed(x))
        state = torch.einsum("tw,hwk->thk", h, value).cumsum(0)
        state = norm(state) * torch.einsum("tw,hwk->thk", h, gate).sigmoid()
        loss = (Reduce.apply(torch.einsum("thk,hwk->tw", state, out)) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        # right: if world > 1:
        if sequence_parallel:  # <- here
            dist.all_reduce(norm.weight.grad)
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
