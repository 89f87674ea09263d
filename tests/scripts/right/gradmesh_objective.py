# about: a mean over all ranks' rows under DDP by gm.objective
# ranks: 2
# expect: none
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradmesh as gm


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(12 + rank)
    for step in range(3):
        rows = 3 + rank
        x, y = torch.randn(rows, 5, generator=generator), torch.randn(rows, 1, generator=generator)
        error = (model(x) - y).square().sum()
        loss = gm.objective(error, weights=rows, local="sum", ddp=model)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"step {step} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
