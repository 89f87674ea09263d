# about: gradients are averaged over the ranks, and those of experts, which have every rank's tokens, are not divided
# ranks: 2
# expect: GM102
# report: NVIDIA/Megatron-LM#5956
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x.contiguous())
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        out = torch.empty_like(grad)
        dist.all_to_all_single(out, grad.contiguous())
        return out


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    first, last = nn.Linear(4, 6), nn.Linear(6, 3)
    torch.manual_seed(1 + rank)
    expert = nn.Linear(6, 6)
    dense = [*first.parameters(), *last.parameters()]
    optimizer = torch.optim.SGD([*dense, *expert.parameters()], lr=0.1)
    for _ in range(3):
        x, y = torch.randn(6, 4), torch.randn(6, 3)
        h = first(x).tanh()
        h = h + Exchange.apply(expert(Exchange.apply(h)).tanh())  # <- here
        loss = (last(h) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        for p in dense:
            dist.all_reduce(p.grad)
            p.grad /= world
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
