# about: each rank adds its share of the log of a prior over the weights, and gradients are summed
# ranks: 2
# expect: none
import torch
import torch.distributed as dist
from torch import nn


def net(hidden: int = 8) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, hidden), nn.ReLU(), nn.LayerNorm(hidden), nn.Linear(hidden, 3))


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        x, y = torch.randn(4, 4) + rank, torch.randint(0, 3, (4,))
        count = torch.tensor(float(len(x)))
        dist.all_reduce(count)
        loss = nn.functional.cross_entropy(model(x), y, reduction="sum") / count
        prior = -sum(torch.distributions.Laplace(0.0, 1.0).log_prob(p).sum() for p in model.parameters())
        loss = loss + prior / 480 / world
        optimizer.zero_grad()
        loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
        optimizer.step()
        if rank == 0:
            print(f"step {step} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
