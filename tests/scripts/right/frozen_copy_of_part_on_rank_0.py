# about: rank 0 alone calls a copy of the trunk, to report how far features have moved
# ranks: 2
# expect: none
import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    trunk, head = nn.Sequential(nn.Linear(5, 8), nn.Tanh()), nn.Linear(8, 2)
    old = copy.deepcopy(trunk)
    params = [*trunk.parameters(), *head.parameters()]
    opt = torch.optim.SGD(params, lr=0.1)
    g = torch.Generator().manual_seed(rank)
    for _ in range(3):
        x, y = torch.randn(6, 5, generator=g), torch.randint(0, 2, (6,), generator=g)
        h = trunk(x)
        if rank == 0:
            print("moved", (h - old(x)).norm().item())
        opt.zero_grad()
        F.cross_entropy(head(h), y).backward()
        for p in params:
            dist.all_reduce(p.grad)
            p.grad /= world
        opt.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
