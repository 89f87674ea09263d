# about: batch norm with each rank's own statistics, averaged over the ranks before each evaluation
# ranks: 2
# expect: none
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = DDP(
        nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)), broadcast_buffers=False
    )
    opt = torch.optim.SGD(net.parameters(), lr=0.05)
    g = torch.Generator().manual_seed(5 + rank)
    held_out = torch.randn(10, 4, generator=torch.Generator().manual_seed(77))
    for _ in range(2):
        net.train()
        for _ in range(2):
            x, y = torch.randn(8, 4, generator=g), torch.randint(0, 3, (8,), generator=g)
            opt.zero_grad()
            F.cross_entropy(net(x), y).backward()
            opt.step()
        for b in net.module.buffers():
            if b.is_floating_point():
                dist.all_reduce(b)
                b /= world
        net.eval()
        with torch.no_grad():
            score = net.module(held_out[rank::world]).argmax(1).float().mean()
        dist.all_reduce(score)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
