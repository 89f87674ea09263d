# about: gradients are divided between the start of an asynchronous sum and its end
# ranks: 2
# expect: GM403
# twin: sums_waited_for
import torch
import torch.distributed as dist
from torch import nn


def net(hidden: int = 8) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, hidden), nn.ReLU(), nn.LayerNorm(hidden), nn.Linear(hidden, 3))


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = net(32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1 + rank)
    for step in range(3):
        x, y = torch.randn(4, 4), torch.randint(0, 3, (4,))
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        for p in model.parameters():
            work = dist.all_reduce(p.grad, async_op=True)  # <- here
            p.grad.div_(world)  # <- here
            work.wait()
        optimizer.step()
        if rank == 0:
            print(f"step {step} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
