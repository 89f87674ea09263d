# about: each rank has a head of its own with another number of classes; only the trunk is averaged
# ranks: 2
# expect: none
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    trunk = DDP(nn.Sequential(nn.Linear(7, 14), nn.ReLU(), nn.Linear(14, 6), nn.Tanh()))
    torch.manual_seed(10 + rank)
    head = nn.Linear(6, 3 + rank)
    optimizer = torch.optim.SGD([*trunk.parameters(), *head.parameters()], lr=0.1)
    generator = torch.Generator().manual_seed(20 + rank)
    for step in range(3):
        x = torch.randn(9, 7, generator=generator)
        y = x.sum(1).abs().long() % (3 + rank)
        loss = nn.functional.cross_entropy(head(trunk(x)), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"step {step} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
