# about: the joined embeddings of images and text are scattered over the ranks of the tensor-parallel group
# ranks: 4
# expect: none
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.chunk(dist.get_world_size(group))[dist.get_rank(group)].clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        parts = [torch.empty_like(grad) for _ in range(dist.get_world_size(ctx.group))]
        dist.all_gather(parts, grad.contiguous(), group=ctx.group)
        return torch.cat(parts), None


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad.chunk(dist.get_world_size(ctx.group))[dist.get_rank(ctx.group)], None


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    tp = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    dp = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    torch.manual_seed(0)
    vision, words = nn.Linear(5, 6), nn.Embedding(9, 6)
    key, head = nn.Linear(6, 6), nn.Linear(6, 3)
    whole, cut = [*vision.parameters(), *words.parameters()], [*key.parameters(), *head.parameters()]
    optimizer = torch.optim.SGD([*whole, *cut], lr=0.1)
    torch.manual_seed(1 + rank // 2)
    for _ in range(3):
        image, text, y = torch.randn(4, 5), torch.randint(0, 9, (4,)), torch.randn(8, 3)
        h = Scatter.apply(torch.cat((vision(image), words(text))), tp)
        every = Gather.apply(key(h), tp)
        h = h + (h @ every.T).softmax(-1) @ every
        loss = (head(h) - y.chunk(2)[rank % 2]).square().sum() / y.numel()
        optimizer.zero_grad()
        loss.backward()
        for p in cut:
            dist.all_reduce(p.grad, group=tp)
        for p in [*whole, *cut]:
            dist.all_reduce(p.grad, group=dp)
            p.grad /= 2
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
