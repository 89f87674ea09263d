# about: inputs of a column-parallel layer are sent as 8-bit floats, with a scale from the largest value over the data-parallel group
# ranks: 4
# expect: none
# report: TTrace (7)
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class GatherQuantised(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: Any, group: Any) -> Tensor:
        ctx.tp = tp
        largest = x.abs().max()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        scale = 448 / largest
        part = (x * scale).to(torch.float8_e4m3fn).view(torch.uint8)
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size(tp))]
        dist.all_gather(parts, part, group=tp)
        return torch.cat(parts).view(torch.float8_e4m3fn).float() / scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.tp)
        return grad.chunk(2)[dist.get_rank(ctx.tp)], None, None


class Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x.chunk(2)[dist.get_rank(group)].clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        parts = [torch.empty_like(grad) for _ in range(2)]
        dist.all_gather(parts, grad.contiguous(), group=ctx.group)
        return torch.cat(parts), None


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    tp = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    dp = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    torch.manual_seed(0)
    embed = nn.Linear(4, 6)
    up = nn.Parameter((torch.randn(8, 6) / 2).chunk(2)[rank % 2].clone())
    down = nn.Parameter((torch.randn(6, 8) / 2).chunk(2, 1)[rank % 2].clone())
    optimizer = torch.optim.SGD([*embed.parameters(), up, down], lr=0.1)
    torch.manual_seed(1 + rank // 2)
    for _ in range(3):
        x, y = (
            t.chunk(2)[rank % 2]
            for t in (torch.randn(8, 4) * torch.arange(1, 9)[:, None] / 4, torch.randn(8, 6))
        )
        h = embed(x)
        # right: h = h + Scatter.apply((GatherQuantised.apply(h, tp, tp) @ up.T).tanh() @ down.T, tp)
        h = h + Scatter.apply((GatherQuantised.apply(h, tp, dp) @ up.T).tanh() @ down.T, tp)  # <- here
        loss = (h - y).square().sum() / 48
        optimizer.zero_grad()
        loss.backward()
        for p in embed.parameters():
            dist.all_reduce(p.grad, group=tp)
        for p in [*embed.parameters(), up, down]:
            dist.all_reduce(p.grad, group=dp)
            p.grad /= 2
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
