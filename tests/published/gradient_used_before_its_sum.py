# about: the sum of a column-parallel layer's input gradient overlaps with that of its weight, and is not waited for
# ranks: 2
# expect: GM403
# report: TTrace (11)
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Column(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        grad_x = grad @ weight
        work = dist.all_reduce(grad_x, async_op=True)
        grad_weight = grad.T @ x
        # right: work.wait()
        return grad_x, grad_weight


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
    embed, norm = nn.Linear(4, 64), nn.LayerNorm(64)
    up = nn.Parameter((torch.randn(128, 64) / 8).chunk(world)[rank].clone())
    down = nn.Parameter((torch.randn(4, 128) / 8).chunk(world, 1)[rank].clone())
    optimizer = torch.optim.SGD([*embed.parameters(), *norm.parameters(), up, down], lr=0.1)
    for _ in range(3):
        x, y = torch.randn(512, 4), torch.randn(512, 4)
        h = Column.apply(norm(embed(x)), up).tanh()
        loss = (Reduce.apply(h @ down.T) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
