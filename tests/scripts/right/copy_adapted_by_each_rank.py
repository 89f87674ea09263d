# about: meta-learning: each rank adapts a copy to its own task, and the model steps along the averaged gradient
# ranks: 2
# expect: none
import copy

import torch
import torch.distributed as dist
from torch import nn


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1 + rank)
    for step in range(3):
        own = copy.deepcopy(model)
        for at in range(3):
            x, y = torch.randn(6, 4), torch.randint(0, 3, (6,))
            loss = nn.functional.cross_entropy(own(x), y)
            grads = torch.autograd.grad(loss, list(own.parameters()))
            for p, g in zip(own.parameters(), grads if at < 2 else (), strict=at < 2):
                p.data = p.data - 0.1 * g
        for p, g in zip(model.parameters(), grads, strict=True):
            dist.all_reduce(g)
            p.grad = g / world
        optimizer.step()
        if rank == 0:
            print(f"step {step} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
