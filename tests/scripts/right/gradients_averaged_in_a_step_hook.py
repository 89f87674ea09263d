# about: a hook before the step, registered on the optimizer, averages the gradients
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
    net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2))
    opt = torch.optim.Adam(net.parameters(), lr=0.01)

    def average(opt: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        for group in opt.param_groups:
            for p in group["params"]:
                dist.all_reduce(p.grad)
                p.grad /= world

    opt.register_step_pre_hook(average)
    g = torch.Generator().manual_seed(rank)
    for _ in range(3):
        x, y = torch.randn(6, 5, generator=g), torch.randint(0, 2, (6,), generator=g)
        opt.zero_grad()
        F.cross_entropy(net(x), y).backward()
        opt.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
