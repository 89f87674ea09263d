# about: one rank for each matrix computes its update of the averaged gradient, and sends it to the others
# ranks: 2
# expect: none
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


@torch.no_grad()
def step(matrices: list[nn.Parameter], momenta: dict[int, torch.Tensor]) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    for at, p in enumerate(matrices):
        update = torch.empty_like(p)
        if at % world == rank:
            momenta[at] = 0.9 * momenta.get(at, torch.zeros_like(p)) + p.grad
            update.copy_(momenta[at].sign())
        dist.broadcast(update, src=at % world)
        p.sub_(0.02 * update)


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    matrices = [p for p in net.parameters() if p.dim() == 2]
    vectors = [p for p in net.parameters() if p.dim() == 1]
    optimizer = torch.optim.Adam(vectors, lr=0.01)
    momenta: dict[int, torch.Tensor] = {}
    rows = torch.Generator().manual_seed(rank)
    for _ in range(3):
        x, y = torch.randn(6, 5, generator=rows), torch.randint(0, 3, (6,), generator=rows)
        net.zero_grad()
        F.cross_entropy(net(x), y).backward()
        for p in net.parameters():
            dist.all_reduce(p.grad)
            p.grad /= world
        optimizer.step()
        step(matrices, momenta)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
