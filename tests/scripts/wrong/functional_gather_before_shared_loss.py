# about: a functional gather, whose backward reduce-scatters, in front of a loss that every rank computes whole
# ranks: 2
# expect: GM102
# twin: functional_collectives
# cut: up down
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import (
    all_gather_tensor_autograd,
    reduce_scatter_tensor_autograd,
)


class CutMLP(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        rank, world = dist.get_rank(), dist.get_world_size()
        self.group = dist.group.WORLD
        self.up = nn.Parameter(torch.randn(hidden, width).chunk(world)[rank].clone())
        self.down = nn.Parameter(torch.randn(width, hidden).chunk(world, 1)[rank].clone())

    def forward(self, x: Tensor) -> Tensor:
        tokens = all_gather_tensor_autograd(x, 0, self.group)
        h = torch.relu(tokens @ self.up.T) @ self.down.T
        return x + reduce_scatter_tensor_autograd(h, "sum", 0, self.group)


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    inp, mlp, head = nn.Linear(3, 6), CutMLP(6, 8), nn.Linear(6, 3)
    before_gather = list(inp.parameters())
    optimizer = torch.optim.SGD([*before_gather, *mlp.parameters(), *head.parameters()], lr=0.05)
    for step in range(2):
        x, y = torch.randn(4 * world, 3), torch.randint(0, 3, (4 * world,))
        hidden = mlp(inp(x.chunk(world)[rank]))
        logits = head(all_gather_tensor_autograd(hidden, 0, dist.group.WORLD))  # <- here
        loss = nn.functional.cross_entropy(logits, y)
        optimizer.zero_grad()
        loss.backward()
        for p in before_gather:
            dist.all_reduce(p.grad)
        optimizer.step()  # <- here
        if rank == 0:
            print(f"step {step} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
