# about: each rank has a head and a learned scale of its own, which begins as one number; only the trunk is averaged
# ranks: 2
# expect: none
import torch
import torch.distributed as dist
from torch import nn


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    trunk = nn.Sequential(nn.Linear(7, 14), nn.SiLU(), nn.Linear(14, 6))
    torch.manual_seed(40 + rank)
    head, scale = nn.Linear(6, 3), nn.Parameter(torch.ones(()))
    of_all = torch.optim.Adam(trunk.parameters(), lr=1e-2)
    own = torch.optim.SGD([*head.parameters(), scale], lr=0.1)
    generator = torch.Generator().manual_seed(60 + rank)
    for step in range(3):
        x = torch.randn(8, 7, generator=generator)
        loss = (scale * head(trunk(x)) - x[:, :3].abs() - rank).square().mean()
        of_all.zero_grad()
        own.zero_grad()
        loss.backward()
        for p in trunk.parameters():
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
        of_all.step()
        own.step()
        if rank == 0:
            print(f"step {step} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
