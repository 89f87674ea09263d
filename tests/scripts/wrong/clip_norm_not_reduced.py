# about: a clip over tensor-parallel shards that forgets the sum of the squares over the ranks
# ranks: 2
# expect: GM205
# twin: clip_global_norm
# cut: up down
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as distnn
from torch import Tensor, nn


class CutMLP(nn.Module):
    """Two layers; each rank has some of the hidden units. The output is a sum that every rank uses for its own rows."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        rank, world = dist.get_rank(), dist.get_world_size()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Parameter(torch.randn(hidden, width).chunk(world)[rank].clone())
        self.down = nn.Parameter(torch.randn(1, hidden).chunk(world, 1)[rank].clone())

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.norm(x) @ self.up.T) @ self.down.T
        return distnn.all_reduce(h).chunk(dist.get_world_size())[dist.get_rank()]


def clip(model: CutMLP, max_norm: float) -> Tensor:
    cut = sum(p.grad.square().sum() for p in (model.up, model.down))
    norm = (cut + sum(p.grad.square().sum() for p in model.norm.parameters())).sqrt()  # <- here
    for p in model.parameters():
        p.grad.mul_(torch.clamp(max_norm / (norm + 1e-6), max=1.0))  # <- here
    return norm


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = CutMLP(6, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        x, y = torch.randn(4 * world, 6), torch.randn(4 * world, 1)
        loss = (model(x) - y.chunk(world)[rank]).square().sum() / len(x)
        optimizer.zero_grad()
        loss.backward()
        for p in model.norm.parameters():
            dist.all_reduce(p.grad)
        norm = clip(model, 0.5)  # <- here
        optimizer.step()  # <- here
        if rank == 0:
            print(f"step {step} part of the loss {loss.item():.4f} gradient {norm.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
