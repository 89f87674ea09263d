# about: a search: each rank trains the same model from one seed with a rate of its own
# ranks: 2
# expect: none
import torch
import torch.distributed as dist
from torch import nn


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    opt = torch.optim.SGD(net.parameters(), lr=[0.1, 0.01, 0.3, 0.03][rank])
    for _ in range(4):
        x = torch.randn(6, 4)
        opt.zero_grad()
        loss = (net(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        opt.step()
    scores = [None] * world
    dist.all_gather_object(scores, loss.item())
    print("best", min(range(world), key=scores.__getitem__)) if rank == 0 else None
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
