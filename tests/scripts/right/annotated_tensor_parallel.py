# about: a tensor-parallel layer whose types are written with spmd_types
# ranks: 2
# expect: none
# cut: up.weight down.weight
import spmd_types as spmd
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn


class MLP(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        rank, world = dist.get_rank(), dist.get_world_size()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden // world, bias=False)
        self.down = nn.Linear(hidden // world, width, bias=False)
        up, down = torch.randn(hidden, width), torch.randn(width, hidden)
        with torch.no_grad():
            self.up.weight.copy_(up.chunk(world)[rank])
            self.down.weight.copy_(down.chunk(world, dim=1)[rank])

    def forward(self, x: Tensor) -> Tensor:
        tp = dist.group.WORLD
        h = spmd.assert_type(self.norm(x), {tp: spmd.I})
        h = spmd.convert(h, tp, src=spmd.I, dst=spmd.R)
        h = spmd.assert_type(F.gelu(self.up(h)), {tp: spmd.V})
        y = spmd.all_reduce(spmd.assert_type(self.down(h), {tp: spmd.P}), tp, src=spmd.P, dst=spmd.I)
        return x + spmd.assert_type(y, {tp: spmd.I})


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), MLP(8, 16), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step in range(3):
        x, y = torch.randn(6, 5), torch.randint(0, 3, (6,))
        x = spmd.assert_type(x, {dist.group.WORLD: spmd.I})
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"step {step} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
