# about: a raw all_reduce passes each rank its part of a gradient; the loss times the ranks takes back the mean of DDP
# ranks: 2
# expect: none
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP


class BarlowTwins(nn.Module):
    def __init__(self, rows: int, width: int = 6) -> None:
        super().__init__()
        self.rows = rows
        self.projector = nn.Sequential(nn.Linear(8, 12), nn.LayerNorm(12), nn.ReLU(), nn.Linear(12, width))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        corr = self.projector(a).T @ self.projector(b) / self.rows
        dist.all_reduce(corr)
        on = (torch.diagonal(corr) - 1).square().sum()
        return on + 0.05 * (corr.square().sum() - torch.diagonal(corr).square().sum())


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DDP(BarlowTwins(12))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(21)
    for step in range(3):
        x = torch.randn(12, 8, generator=generator)
        a, b = (x + 0.1 * torch.randn(x.shape, generator=generator) for _ in range(2))
        loss = model(a.chunk(world)[rank], b.chunk(world)[rank]) * world
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"step {step} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
