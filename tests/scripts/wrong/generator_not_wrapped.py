# about: a GAN whose critic is in DDP and whose generator is not
# ranks: 2
# expect: GM101
# also: GM201
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    maker = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 2))
    critic = nn.Sequential(nn.Linear(2, 6), nn.ReLU(), nn.Linear(6, 1))
    judge = DDP(critic)
    opt_m, opt_c = (
        torch.optim.Adam(maker.parameters(), lr=0.01),
        torch.optim.Adam(critic.parameters(), lr=0.01),
    )
    torch.manual_seed(33 + rank)
    for _ in range(3):
        real, fake = torch.randn(6, 2) + 1, maker(torch.randn(6, 3))
        opt_c.zero_grad()
        (F.softplus(judge(fake.detach())) + F.softplus(-judge(real))).mean().backward()
        opt_c.step()
        opt_m.zero_grad()
        F.softplus(-critic(fake)).mean().backward()  # <- here
        opt_m.step()  # <- here
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
