# about: an optimizer with a rate for each layer takes the norms of tensor-parallel shards
# ranks: 2
# expect: GM207
# twin: layerwise_rates_of_whole_layers
# cut: up_weight up_bias down_weight
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn


class Layerwise(torch.optim.Optimizer):
    """Moves each parameter by a share of its own norm."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"] * float(p.norm() / (p.grad.norm() + 1e-6)))  # <- here


class CopyToTensorParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class ReduceFromTensorParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class ParallelMLP(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        rank, world = dist.get_rank(), dist.get_world_size()
        up, down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        own = slice(rank * hidden // world, (rank + 1) * hidden // world)
        self.norm = nn.LayerNorm(width)
        self.up_weight = nn.Parameter(up.weight.detach()[own].clone())
        self.up_bias = nn.Parameter(up.bias.detach()[own].clone())
        self.down_weight = nn.Parameter(down.weight.detach()[:, own].clone())
        self.down_bias = nn.Parameter(down.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        h = CopyToTensorParallel.apply(self.norm(x))
        h = F.gelu(F.linear(h, self.up_weight, self.up_bias))
        h = ReduceFromTensorParallel.apply(F.linear(h, self.down_weight))
        return x + h + self.down_bias


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), ParallelMLP(8, 16), nn.Linear(8, 3))
    optimizer = Layerwise(model.parameters(), lr=1e-2)
    for step in range(3):
        x, y = torch.randn(6, 5), torch.randint(0, 3, (6,))
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"step {step} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
