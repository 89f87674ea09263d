# about: the loss averaged over ranks by torch.distributed.nn before backward, under DDP: both averages cancel
# ranks: 2
# expect: none
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as distnn
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(6, 8), nn.SiLU(), nn.Linear(8, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(4 + rank)
    for step in range(3):
        x, y = torch.randn(5, 6, generator=generator), torch.randn(5, 1, generator=generator)
        error = (model(x) - y).square().mean()
        loss = (distnn.all_reduce(error) / world).sqrt()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"step {step} rmse {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
