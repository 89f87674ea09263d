# about: variance reduction: gradients of a snapshot are subtracted, and the snapshot's average is added
# ranks: 2
# expect: none
import copy

import torch
import torch.distributed as dist
from torch import Tensor, nn


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))
    opt = torch.optim.SGD(net.parameters(), lr=0.05)
    g = torch.Generator().manual_seed(rank)
    rows = torch.randn(24, 4, generator=g)

    def gradient(model: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        return torch.autograd.grad(loss, list(model.parameters()))

    for _ in range(2):
        anchor = copy.deepcopy(net)
        whole = [t.clone() for t in gradient(anchor, rows)]
        for t in whole:
            dist.all_reduce(t)
            t /= world
        for x in rows.split(12):
            for p, new, old, mean in zip(
                net.parameters(), gradient(net, x), gradient(anchor, x), whole, strict=True
            ):
                p.grad = new - old
                dist.all_reduce(p.grad)
                p.grad = p.grad / world + mean
            opt.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
