# about: a router sees each rank's part of the sequence, and its gradient is not summed with those of the norm
# ranks: 2
# expect: GM101
# report: TTrace (6)
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size())[dist.get_rank()]


class ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = x.new_empty(len(x) // dist.get_world_size(), x.shape[1])
        dist.reduce_scatter_tensor(out, x.contiguous())
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        out = grad.new_empty(len(grad) * dist.get_world_size(), grad.shape[1])
        dist.all_gather_into_tensor(out, grad.contiguous())
        return out


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    norm, router = nn.LayerNorm(6), nn.Linear(6, 3)
    nn.init.normal_(norm.weight)
    up, down = torch.randn(3, 8, 6) / 2, torch.randn(3, 6, 8) / 2
    up, down = (
        nn.Parameter(up.chunk(world, 1)[rank].clone()),
        nn.Parameter(down.chunk(world, 2)[rank].clone()),
    )
    optimizer = torch.optim.SGD([*norm.parameters(), *router.parameters(), up, down], lr=0.1)
    for _ in range(3):
        x, y = (torch.randn(8, 6) for _ in range(2))
        h = norm(x.chunk(world)[rank])
        best, at = router(h).softmax(-1).max(-1)
        ats = [torch.empty_like(at) for _ in range(world)]
        dist.all_gather(ats, at)
        at, best, h = torch.cat(ats), Gather.apply(best), Gather.apply(h)
        part = torch.einsum("tfw,tw->tf", up[at], h).tanh()
        part = best[:, None] * torch.einsum("twf,tf->tw", down[at], part)
        loss = (ReduceScatter.apply(part) - y.chunk(world)[rank]).square().sum() / 48
        optimizer.zero_grad()
        loss.backward()
        # right: for p in [*norm.parameters(), *router.parameters()]:
        for p in [*norm.parameters()]:  # <- here
            dist.all_reduce(p.grad)
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
