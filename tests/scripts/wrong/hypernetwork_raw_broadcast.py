# about: weights made by rank 0's hypernetwork travel by dist.broadcast: the other ranks' gradient is lost
# ranks: 2
# expect: GM106
# twin: hypernetwork
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    hyper = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 5 * 3))
    body = nn.Linear(6, 5)
    optimizer = torch.optim.Adam([*hyper.parameters(), *body.parameters()], lr=1e-2)
    generator = torch.Generator().manual_seed(30 + rank)
    task = torch.randn(4, generator=generator)
    for step in range(3):
        weight = hyper(task).view(3, 5)
        dist.broadcast(weight, src=0)  # <- here
        x = torch.randn(7, 6, generator=generator)
        y = torch.randint(0, 3, (7,), generator=generator)
        loss = F.cross_entropy(F.linear(torch.relu(body(x)), weight), y)
        optimizer.zero_grad()
        loss.backward()
        for p in [*hyper.parameters(), *body.parameters()]:
            dist.all_reduce(p.grad)
            p.grad /= world
        optimizer.step()
        if rank == 0:
            print(f"step {step} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
