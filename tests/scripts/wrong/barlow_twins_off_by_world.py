# about: the cross-correlation is summed by dist.all_reduce: each rank keeps its own part, and DDP divides it by W
# ranks: 2
# expect: GM109
# twin: barlow_twins
# also: GM106
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


class BarlowTwins(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.projector = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, width))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        za, zb = self.projector(a), self.projector(b)
        corr = za.T @ zb / (len(a) * dist.get_world_size())
        dist.all_reduce(corr)  # <- here
        on = (torch.diagonal(corr) - 1).square().sum()
        off = corr.square().sum() - torch.diagonal(corr).square().sum()
        return on + 0.005 * off


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(BarlowTwins())  # <- here
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(21 + rank)
    for step in range(3):
        x = torch.randn(6, 8, generator=generator)
        noise = 0.1 * torch.randn(2, 6, 8, generator=generator)
        loss = model(x + noise[0], x + noise[1])
        optimizer.zero_grad()
        loss.backward()  # <- here
        optimizer.step()
        if rank == 0:
            print(f"step {step} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
