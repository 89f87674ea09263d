# about: the loss averaged over the ranks by a Function that passes 1/W on, and DDP divides by W again
# ranks: 2
# expect: GM109
# twin: loss_averaged_with_gradient
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP


class RankMean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x / dist.get_world_size()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad / dist.get_world_size()  # <- here


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(6, 8), nn.SiLU(), nn.Linear(8, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(4 + rank)
    for step in range(3):
        x, y = torch.randn(5, 6, generator=generator), torch.randn(5, 1, generator=generator)
        error = (model(x) - y).square().mean()
        loss = RankMean.apply(error).sqrt()  # <- here
        optimizer.zero_grad()
        loss.backward()  # <- here
        optimizer.step()
        if rank == 0:
            print(f"step {step} rmse {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
