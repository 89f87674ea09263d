# about: each rank divides its mean loss by the number of ranks, and DDP divides again
# ranks: 2
# expect: GM109
# twin: ddp_no_sync
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

ACCUMULATE = 3


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(20 + rank)
    for step in range(2):
        total = 0.0
        for micro in range(ACCUMULATE):
            x = torch.randn(4, 6, generator=generator)
            y = torch.randint(0, 2, (4,), generator=generator)
            last = micro == ACCUMULATE - 1
            with nullcontext() if last else model.no_sync():
                loss = nn.functional.cross_entropy(model(x), y) / ACCUMULATE
                loss = loss / dist.get_world_size()  # <- here
                loss.backward()  # <- here
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step} loss {total:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
