# about: sequence parallelism without the sum of the last norm's gradients over the ranks
# ranks: 2
# expect: GM101
# report: NVIDIA/Megatron-LM#1446
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = x.new_empty(dist.get_world_size() * len(x), x.shape[1])
        dist.all_gather_into_tensor(out, x.contiguous())
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        out = grad.new_empty(len(grad) // dist.get_world_size(), grad.shape[1])
        dist.reduce_scatter_tensor(out, grad.contiguous())
        return out


class Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = x.new_empty(len(x) // dist.get_world_size(), x.shape[1])
        dist.reduce_scatter_tensor(out, x.contiguous())
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        out = grad.new_empty(dist.get_world_size() * len(grad), grad.shape[1])
        dist.all_gather_into_tensor(out, grad.contiguous())
        return out


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    norms = nn.ModuleList(nn.LayerNorm(6) for _ in range(2))
    for norm in norms:
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    wide, narrow = torch.randn(8, 6) / 2, torch.randn(6, 8) / 2
    a = nn.Parameter(wide.chunk(world)[rank].clone())
    b = nn.Parameter(narrow.chunk(world, 1)[rank].clone())
    optimizer = torch.optim.SGD([*norms.parameters(), a, b], lr=0.1)
    for _ in range(3):
        x, y = (torch.randn(4, 6).chunk(world)[rank] for _ in range(2))
        h = x + Scatter.apply((Gather.apply(norms[0](x)) @ a.T).relu() @ b.T)
        loss = (norms[1](h) - y).square().sum() / 24
        optimizer.zero_grad()
        loss.backward()
        for p in norms[0].parameters():
            dist.all_reduce(p.grad)
        optimizer.step()  # <- here
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
