# about: rank 0 alone steps along the averaged gradient
# ranks: 2
# expect: GM201
# twin: server_broadcasts_after_its_step
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
    torch.manual_seed(1 + rank)
    for step in range(3):
        x, y = torch.randn(4, 4), torch.randint(0, 3, (4,))
        loss = nn.functional.cross_entropy(model(x), y) / world
        model.zero_grad()
        loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
        if rank == 0:
            optimizer.step()  # <- here
        if rank == 0:
            print(f"step {step} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
