# about: a contrastive loss by gradmesh's gather, gradients averaged by hand
# ranks: 2
# expect: none
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import gradmesh as gm


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    tower = nn.Linear(6, 4)
    optimizer = torch.optim.SGD(tower.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(3 + rank)
    for step in range(3):
        one, other = torch.randn(4, 6, generator=generator), torch.randn(4, 6, generator=generator)
        a, b = F.normalize(tower(one)), F.normalize(tower(other))
        labels = torch.arange(len(a)) + rank * len(a)
        loss = F.cross_entropy(5 * a @ gm.all_gather(b).T, labels)
        optimizer.zero_grad()
        loss.backward()
        for p in tower.parameters():
            dist.all_reduce(p.grad)
            p.grad /= world
        optimizer.step()
        if rank == 0:
            print(f"step {step} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
