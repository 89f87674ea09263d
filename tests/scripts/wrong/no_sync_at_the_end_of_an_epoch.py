# about: no_sync by the number of micro-batches: the step at the end of an epoch has gradients that are not summed
# ranks: 2
# expect: GM101
# twin: no_sync_fewer_at_the_end
# steps: 6
import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

MICRO_BATCHES, ACCUMULATED = 7, 3


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(20 + rank)
    for epoch in range(2):
        for at in range(MICRO_BATCHES):
            x, y = torch.randn(4, 6, generator=generator), torch.randint(0, 3, (4,), generator=generator)
            count = min(ACCUMULATED, MICRO_BATCHES - at // ACCUMULATED * ACCUMULATED)
            last = (at + 1) % ACCUMULATED == 0 or at + 1 == MICRO_BATCHES
            with contextlib.nullcontext() if (at + 1) % ACCUMULATED == 0 else model.no_sync():
                loss = nn.functional.cross_entropy(model(x), y) / count
                loss.backward()
            if last:
                optimizer.step()  # <- here
                optimizer.zero_grad()
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
