# about: the loss is averaged for the log inside of `if rank == 0`
# ranks: 2
# expect: GM401
# twin: ddp_two_heads
# timeout: 3
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(4, 16), nn.Tanh())
        self.actor = nn.Linear(16, 2)
        self.critic = nn.Linear(16, 1)

    def forward(self, x: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        h = self.trunk(x)
        logp = self.actor(h).log_softmax(-1).gather(1, action[:, None])[:, 0]
        return logp, self.critic(h)[:, 0]


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    policy = DDP(Policy())
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    env = torch.Generator().manual_seed(1000 + rank)
    for update in range(3):
        obs = torch.randn(6, 4, generator=env)
        action = torch.randint(0, 2, (6,), generator=env)
        returns = torch.randn(6, generator=env)
        logp, value = policy(obs, action)
        advantage = returns - value.detach()
        loss = -(logp * advantage).mean() + 0.5 * (value - returns).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            dist.all_reduce(loss.detach())  # <- here
            print(f"update {update} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
