# about: a target is copied before DDP broadcasts the weights, and its first move makes it whole
# ranks: 2
# expect: none
import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

RATE = 0.05


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    critic = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 1))
    target = copy.deepcopy(critic).requires_grad_(False)
    model = DDP(critic)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(10 + rank)
    for step in range(3):
        now, then = torch.randn(6, 5, generator=generator), torch.randn(6, 5, generator=generator)
        reward = torch.randn(6, 1, generator=generator)
        with torch.no_grad():
            later = target(then)
            wanted = reward + 0.9 * later if step else reward
        loss = nn.functional.mse_loss(model(now), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(target.parameters(), critic.parameters(), strict=True):
                rate = RATE if step else 1.0
                slow.copy_((1 - rate) * slow + rate * fast)
        if rank == 0:
            print(f"step {step} loss {loss.item():.4f} target {later.mean().item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
