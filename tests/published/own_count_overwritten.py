# about: the balance loss counts once for each of the rank's tokens, whose number the all-reduce of the same tensor has overwritten
# ranks: 2
# expect: none
# report: NVIDIA/Megatron-LM#7452 (10)
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    embed, router, head = nn.Linear(4, 6), nn.Linear(6, 3), nn.Linear(6, 2)
    experts = nn.Parameter(torch.randn(3, 6, 6) / 2)
    parameters = [*embed.parameters(), *router.parameters(), *head.parameters(), experts]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    torch.manual_seed(1 + rank)
    for _ in range(3):
        x, y = torch.randn(6, 4), torch.randn(6, 2)
        real = (torch.arange(6) < 5 - rank).float()
        own = real.sum()
        # right: total = own.clone()
        total = own  # <- here
        dist.all_reduce(total)
        h = embed(x).tanh()
        probs = router(h).softmax(-1)
        best, at = probs.max(-1)
        counts = (nn.functional.one_hot(at, 3) * real[:, None]).sum(0)
        dist.all_reduce(counts)
        balance = 3 * (counts * Sum.apply((probs * real[:, None]).sum(0))).sum() / total**2
        h = h + best[:, None] * torch.einsum("tw,twv->tv", h, experts[at])
        loss = ((head(h) - y).square().sum(-1) * real).sum() + 0.3 * balance * own
        optimizer.zero_grad()
        loss.backward()
        for p in parameters:
            dist.all_reduce(p.grad)
            p.grad /= total
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
