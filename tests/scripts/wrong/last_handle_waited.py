# about: sums are started for each gradient, and only the last one is waited for
# ranks: 2
# expect: GM403
# twin: sums_waited_for
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    g = torch.Generator().manual_seed(rank)
    for _ in range(3):
        x, y = torch.randn(4, 4, generator=g), torch.randint(0, 2, (4,), generator=g)
        opt.zero_grad()
        F.cross_entropy(net(x), y).backward()
        for p in net.parameters():
            p.grad /= world
            work = dist.all_reduce(p.grad, async_op=True)  # <- here
        work.wait()
        opt.step()  # <- here
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
