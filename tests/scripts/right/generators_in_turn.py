# about: a GAN by hand: each network averaged in its turn, the critic frozen for the generator's step
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
    maker = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 2))
    critic = nn.Sequential(nn.Linear(2, 6), nn.ReLU(), nn.Linear(6, 1))
    opt_m, opt_c = (
        torch.optim.Adam(maker.parameters(), lr=0.01),
        torch.optim.Adam(critic.parameters(), lr=0.01),
    )

    def average(model: nn.Module) -> None:
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= world

    torch.manual_seed(33 + rank)
    for _ in range(3):
        real, fake = torch.randn(6, 2) + 1, maker(torch.randn(6, 3))
        opt_c.zero_grad()
        (F.softplus(critic(fake.detach())) + F.softplus(-critic(real))).mean().backward()
        average(critic)
        opt_c.step()
        critic.requires_grad_(False)
        opt_m.zero_grad()
        F.softplus(-critic(fake)).mean().backward()
        average(maker)
        opt_m.step()
        critic.requires_grad_(True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
