# about: norms of replicated layers are clipped on the first tensor parallel rank only, and their copies drift apart
# ranks: 2
# expect: GM205
# also: GM201
# report: deepspeedai/DeepSpeed#1801
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
    torch.manual_seed(0)
    norm = nn.LayerNorm(6)
    nn.init.normal_(norm.weight)
    a = nn.Parameter(torch.randn(8, 6).chunk(world)[rank].clone())
    b = nn.Parameter(torch.randn(6, 8).chunk(world, 1)[rank].clone())
    optimizer = torch.optim.SGD([*norm.parameters(), a, b], lr=0.1)
    for _ in range(3):
        x, y = torch.randn(5, 6), torch.randn(5, 6)
        loss = (Reduce.apply((Copy.apply(norm(x)) @ a.T).relu() @ b.T) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        own = [a, b] if rank else [*norm.parameters(), a, b]
        total = sum(p.grad.square().sum() for p in own)
        dist.all_reduce(total)
        for p in own:
            p.grad *= min(1.0, 0.1 / float(total.sqrt()))  # <- here
        optimizer.step()  # <- here
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
