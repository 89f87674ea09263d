# about: logits in tiles that one buffer holds, folded in place into statistics of slices, in a Function of its own
# ranks: 2
# expect: none
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

TILE = 4


def fold(tile: Tensor, targets: Tensor, first: int, most: Tensor, total: Tensor, chosen: Tensor) -> None:
    largest = torch.maximum(most, tile.amax(-1))
    total.mul_(torch.exp(most - largest)).add_(torch.exp(tile - largest.unsqueeze(-1)).sum(-1))
    most.copy_(largest)
    local = targets - first
    here = (local >= 0) & (local < TILE)
    logit = tile.gather(-1, local.clamp(0, TILE - 1).unsqueeze(-1)).squeeze(-1)
    chosen.copy_(torch.where(here, logit, chosen))


class LogProbabilities(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        rows = len(hidden)
        most = torch.full((rows,), float("-inf"))
        total, chosen = torch.zeros(rows), torch.zeros(rows)
        buffer = torch.empty(rows, TILE)
        for first in range(0, len(weight), TILE):
            tile = buffer[:rows, :TILE]
            torch.mm(hidden, weight[first : first + TILE].t(), out=tile)
            fold(tile, targets[0:rows], first, most[0:rows], total[0:rows], chosen[0:rows])
        log_total = most + torch.log(total)
        is_first = (chosen >= most) & (chosen > 0)
        ctx.save_for_backward(hidden, weight, targets, log_total)
        ctx.mark_non_differentiable(is_first)
        return chosen - log_total, is_first

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> Any:
        hidden, weight, targets, log_total = ctx.saved_tensors
        chosen = nn.functional.one_hot(targets, len(weight))
        logits = (chosen - torch.exp(hidden @ weight.t() - log_total.unsqueeze(-1))) * gradient.unsqueeze(-1)
        return logits @ weight, logits.t() @ hidden, None


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 5), nn.Linear(5, 8, bias=False)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        hidden = self.body(x).tanh().clone(memory_format=torch.contiguous_format)
        return LogProbabilities.apply(hidden, self.head.weight, targets)[0]


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(Model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(60 + dist.get_rank())
    for _ in range(2):
        x, targets = torch.randn(3, 6, generator=data), torch.randint(0, 8, (3,), generator=data)
        optimizer.zero_grad()
        (-model(x, targets).mean()).backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
