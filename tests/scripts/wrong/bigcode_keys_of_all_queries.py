# about: multi-query attention: keys and values are the same on the ranks, and their bias misses the sum
# ranks: 2
# expect: GM101
# report: bigcode-project/Megatron-LM#11
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


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
    query = nn.Parameter(torch.randn(4, 6, 3).chunk(world)[rank].clone())
    out = nn.Parameter(torch.randn(4, 3, 6).chunk(world)[rank].clone())
    keys_and_values = nn.Linear(6, 6)
    optimizer = torch.optim.SGD([query, out, *keys_and_values.parameters()], lr=0.1)
    for _ in range(3):
        x, y = torch.randn(5, 6), torch.randn(5, 6)
        k, v = keys_and_values(x).chunk(2, -1)
        seen = torch.einsum("sw,hwd,td->hst", x, query, k).softmax(-1) @ v  # <- here
        loss = (Reduce.apply(torch.einsum("hsd,hdo->so", seen, out)) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        dist.all_reduce(keys_and_values.weight.grad)
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
