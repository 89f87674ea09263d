# about: context-parallel ranks' losses are parts of a mean over all tokens, times the number of ranks, and gradients are summed
# ranks: 2
# expect: none
# report: TTrace (3)
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


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    embed, key, head = nn.Embedding(9, 6), nn.Linear(6, 6), nn.Linear(6, 9)
    parameters = [*embed.parameters(), *key.parameters(), *head.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    for _ in range(3):
        tokens = torch.randint(0, 9, (13,))
        x, y = tokens[:-1].chunk(world)[rank], tokens[1:].chunk(world)[rank]
        h = embed(x)
        every = Gather.apply(key(h))
        h = h + (h @ every.T).softmax(-1) @ every
        loss = nn.functional.cross_entropy(head(h), y, reduction="sum") / 12
        optimizer.zero_grad()
        # right: loss.backward()
        (loss * world).backward()  # <- here
        for p in parameters:
            dist.all_reduce(p.grad)
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
