# about: a parameter that is sharded over heads counts in the norm of the gradients on one rank only
# ranks: 2
# expect: GM205
# twin: norm_of_heads
# report: NVIDIA/Megatron-LM#7452 (8)
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

HEADS, WIDTH = 4, 8


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
    embed = nn.Linear(WIDTH, WIDTH)
    heads = HEADS // world
    query, value = (nn.Parameter(torch.randn(HEADS, WIDTH, 3).chunk(world)[rank].clone()) for _ in range(2))
    out = nn.Parameter(torch.randn(HEADS, 3, WIDTH).chunk(world)[rank].clone())
    sink = nn.Parameter(torch.randn(HEADS).chunk(world)[rank].clone() + 2)
    parameters = [*embed.parameters(), query, value, out, sink]
    sharded = [query, value, out]
    optimizer = torch.optim.SGD(parameters, lr=0.3)
    for _ in range(3):
        x, y = torch.randn(5, WIDTH), torch.randn(5, WIDTH)
        h = Copy.apply(embed(x))
        scores = torch.einsum("sw,hwk,tw->hst", h, query, h)
        scores = torch.cat((scores, sink[:, None, None].expand(heads, 5, 1)), -1).softmax(-1)[..., :-1]
        seen = torch.einsum("hst,tw,hwk,hko->so", scores, h, value, out)
        loss = (Reduce.apply(seen) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        counted = [p for p in parameters if rank == 0 or any(p is other for other in sharded)]
        norm = sum(p.grad.square().sum() for p in counted)
        dist.all_reduce(norm)
        for p in parameters:
            p.grad *= min(1.0, 1.0 / float(norm.sqrt()))  # <- here
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
