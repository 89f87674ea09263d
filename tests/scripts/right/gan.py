# about: a GAN: two models under DDP, two optimizers, noise of each rank's own
# ranks: 2
# expect: none
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    generator = DDP(nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)))
    critic = DDP(nn.Sequential(nn.Linear(2, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1)))
    g_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.99))
    d_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.99))
    torch.manual_seed(100 + rank)
    for step in range(2):
        real = torch.randn(6, 2) * 0.3 + 1
        fake = generator(torch.randn(6, 3))

        d_loss = F.softplus(-critic(real)).mean() + F.softplus(critic(fake.detach())).mean()
        d_optimizer.zero_grad()
        d_loss.backward()
        d_optimizer.step()

        critic.requires_grad_(False)
        g_loss = F.softplus(-critic(fake)).mean()
        g_optimizer.zero_grad()
        g_loss.backward()
        g_optimizer.step()
        critic.requires_grad_(True)
        if rank == 0:
            print(f"step {step} critic {d_loss.item():.4f} generator {g_loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
