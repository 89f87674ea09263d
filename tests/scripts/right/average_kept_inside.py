# about: an average of the weights inside of the module, copied before the weights are broadcast, that no loss uses
# ranks: 2
# expect: none
import copy

import torch
import torch.distributed as dist
from torch import Tensor, nn


def net(hidden: int = 8) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, hidden), nn.ReLU(), nn.LayerNorm(hidden), nn.Linear(hidden, 3))


class Averaged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = net()
        self.average = copy.deepcopy(self.net).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    torch.manual_seed(rank)
    model = Averaged()
    for p in model.net.parameters():
        dist.broadcast(p.data, src=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        x, y = torch.randn(4, 4), torch.randint(0, 3, (4,))
        loss = nn.functional.cross_entropy(model(x), y) / world
        optimizer.zero_grad()
        loss.backward()
        for p in model.net.parameters():
            dist.all_reduce(p.grad)
        optimizer.step()
        with torch.no_grad():
            for p, average in zip(model.net.parameters(), model.average.parameters(), strict=True):
                average.lerp_(p, 0.1)
        if rank == 0:
            print(f"step {step} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
