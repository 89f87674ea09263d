# about: an optimizer with a rate for each layer, which sums squared norms of FSDP2 shards over the ranks
# ranks: 2
# expect: none
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard


class Layerwise(torch.optim.Optimizer):
    """Moves each parameter by a share of its own norm."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                own, grad = p.to_local(), p.grad.to_local()
                squares = torch.stack([own.square().sum(), grad.square().sum()])
                dist.all_reduce(squares)
                rate = (squares[0] / (squares[1] + 1e-6)).sqrt()
                own.add_(rate * grad, alpha=-group["lr"])


def net(hidden: int = 8) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, hidden), nn.ReLU(), nn.LayerNorm(hidden), nn.Linear(hidden, 3))


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = net()
    fully_shard(model)
    optimizer = Layerwise(model.parameters(), lr=1e-2)
    for step in range(3):
        x, y = torch.randn(4, 4) + rank, torch.randint(0, 3, (4,))
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"step {step} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
