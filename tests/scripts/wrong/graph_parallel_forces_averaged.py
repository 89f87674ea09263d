# about: ranks share the atoms of one system, and DDP averages the parts of its gradient, which have to be summed
# ranks: 2
# expect: GM109
# twin: graph_parallel_forces
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP


class SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Potential(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.atoms = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1, bias=False))

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        positions = positions.detach().requires_grad_()
        own = positions.tensor_split(dist.get_world_size())[dist.get_rank()]
        near = torch.exp(-((own[:, None] - positions[None]) ** 2).sum(-1)).sum(1, keepdim=True)
        energy = self.atoms(near).sum()
        (slope,) = torch.autograd.grad(energy, positions, create_graph=True)
        return SumOverRanks.apply(energy), SumOverRanks.apply(-slope)


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(Potential())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for _ in range(3):
        positions, energy, forces = torch.randn(7, 3), torch.randn(()), torch.randn(7, 3)
        optimizer.zero_grad()
        made, slopes = model(positions)
        loss = (made - energy) ** 2 + ((slopes - forces) ** 2).sum() / 7
        loss.backward()  # <- here
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
