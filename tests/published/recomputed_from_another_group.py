# about: recomputation keeps a part of its input on each rank of a group and gathers it in backward, over the data-parallel group in place of the tensor-parallel one
# ranks: 4
# expect: GM104
# report: NVIDIA/Megatron-LM#7452 (4)
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


class Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Any, group: Any, x: Tensor) -> Tensor:
        ctx.run, ctx.group = run, group
        ctx.save_for_backward(x.chunk(dist.get_world_size(group))[dist.get_rank(group)].clone())
        return run(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, Tensor]:
        (part,) = ctx.saved_tensors
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size(ctx.group))]
        dist.all_gather(parts, part, group=ctx.group)
        x = torch.cat(parts).requires_grad_()
        with torch.enable_grad():
            torch.autograd.backward(ctx.run(x), grad)
        return None, None, x.grad


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    tp = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    dp = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    torch.manual_seed(0)
    embed, head = nn.Linear(4, 6), nn.Linear(6, 3)
    up = nn.Parameter((torch.randn(8, 6) / 2).chunk(2)[rank % 2].clone())
    down = nn.Parameter((torch.randn(6, 8) / 2).chunk(2, 1)[rank % 2].clone())
    parameters = [*embed.parameters(), *head.parameters(), up, down]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    torch.manual_seed(1 + rank // 2)
    for _ in range(3):
        x, y = torch.randn(6, 4), torch.randn(6, 3)
        h = embed(x)
        # right: h = h + Recompute.apply(lambda h: Reduce.apply((Copy.apply(h, tp) @ up.T).tanh() @ down.T, tp), tp, h)
        h = h + Recompute.apply(lambda h: Reduce.apply((Copy.apply(h, tp) @ up.T).tanh() @ down.T, tp), dp, h)  # <- here
        loss = (head(h) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        for p in parameters:
            dist.all_reduce(p.grad, group=dp)
            p.grad /= 2
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
