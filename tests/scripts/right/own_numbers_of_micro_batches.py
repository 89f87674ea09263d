# about: rank 1 has three micro-batches and rank 0 two; gradients of sums, divided by all ranks' rows
# ranks: 2
# expect: none
import torch
import torch.distributed as dist
from torch import nn


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 1))
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    g = torch.Generator().manual_seed(rank)
    for _ in range(3):
        opt.zero_grad()
        rows = torch.zeros(())
        for _ in range(2 + rank):
            x = torch.randn(3, 4, generator=g)
            rows += len(x)
            (net(x) - x.amax(1, keepdim=True)).square().sum().backward()
        dist.all_reduce(rows)
        for p in net.parameters():
            dist.all_reduce(p.grad)
            p.grad /= rows
        opt.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
