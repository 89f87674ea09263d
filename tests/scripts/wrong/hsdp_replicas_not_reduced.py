# about: shards in pairs, two replicas of each: nothing sums the gradient over the replicas
# ranks: 4
# expect: GM101
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(2)]
        dist.all_gather(parts, x, group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        out = grad.new_empty(grad.shape[0] // 2, *grad.shape[1:])
        dist.reduce_scatter_tensor(out, grad.contiguous(), group=ctx.group)
        return out / 2, None


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    torch.manual_seed(0)
    whole = nn.Linear(6, 8)
    weight = nn.Parameter(whole.weight.detach().chunk(2)[rank % 2].clone())
    optimizer = torch.optim.SGD([weight], lr=0.1)
    torch.manual_seed(1 + rank)
    for _ in range(2):
        x = torch.randn(4, 6)
        full = Gathered.apply(weight, pairs[rank // 2])
        loss = (x @ full.T - x[:, :1]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()  # <- here
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
