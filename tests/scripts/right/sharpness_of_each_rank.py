# about: SAM with a perturbation of each rank's own, from its own gradient and norm; the second gradient is averaged
# ranks: 2
# expect: none
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    g = torch.Generator().manual_seed(rank)
    for _ in range(3):
        x = torch.randn(6, 4, generator=g)
        y = x.square().sum(1, keepdim=True)
        opt.zero_grad()
        F.mse_loss(net(x), y).backward()
        saved = [p.detach().clone() for p in net.parameters()]
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in net.parameters()]).norm()
            for p in net.parameters():
                p.add_(p.grad, alpha=0.05 / (norm.item() + 1e-12))
        opt.zero_grad()
        F.mse_loss(net(x), y).backward()
        with torch.no_grad():
            for p, s in zip(net.parameters(), saved, strict=True):
                p.copy_(s)
                dist.all_reduce(p.grad)
                p.grad /= world
        opt.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
