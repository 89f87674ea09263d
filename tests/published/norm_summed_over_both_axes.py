# about: tensor and context parallelism: the norm in front of a column-parallel layer is averaged over context-parallel ranks, and summed over tensor-parallel ones, which its input's gradient was before
# ranks: 4
# expect: GM102
# report: TTrace (14)
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def summed(x: Tensor, group: Any) -> Tensor:
    x = x.clone()
    dist.all_reduce(x, group=group)
    return x


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return summed(grad, ctx.group), None


class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        return summed(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    tp = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    cp = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    torch.manual_seed(0)
    embed, norm = nn.Linear(4, 6), nn.LayerNorm(6)
    nn.init.normal_(norm.weight)
    up = nn.Parameter((torch.randn(8, 6) / 2).chunk(2)[rank % 2].clone())
    down = nn.Parameter((torch.randn(6, 8) / 2).chunk(2, 1)[rank % 2].clone())
    optimizer = torch.optim.SGD([*embed.parameters(), *norm.parameters(), up, down], lr=0.1)
    for _ in range(3):
        x, y = (t.chunk(2)[rank // 2] for t in (torch.randn(8, 4), torch.randn(8, 6)))
        h = embed(x)
        h = h + Reduce.apply((Copy.apply(norm(h), tp) @ up.T).tanh() @ down.T, tp)
        loss = (h - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        for p in norm.parameters():
            # right: dist.all_reduce(p.grad, group=cp)
            dist.all_reduce(p.grad, group=None)  # <- here
            p.grad /= 2
        for p in [*embed.parameters(), up, down]:
            dist.all_reduce(p.grad, group=cp)
            p.grad /= 2
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
