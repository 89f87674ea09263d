# about: quadrature weights in a buffer, of which each rank holds those of its part of a field
# ranks: 2
# expect: none
import torch
import torch.distributed as dist
from torch import Tensor, nn


class Integral(nn.Module):
    def __init__(self, rank: int, world: int) -> None:
        super().__init__()
        points = 8 // world
        mine = torch.linspace(0, 1, 8)[rank * points : (rank + 1) * points]
        self.register_buffer("quadrature", mine.clone(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.quadrature).sum()


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    linear, integral = nn.Linear(3, 1), Integral(rank, world)
    optimizer = torch.optim.SGD(linear.parameters(), lr=0.1)
    for step in range(2):
        field = torch.randn(8, 3, generator=torch.Generator().manual_seed(step))
        loss = integral(linear(field.chunk(world)[rank])[:, 0].square())
        optimizer.zero_grad()
        loss.backward()
        for p in linear.parameters():
            dist.all_reduce(p.grad)
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
