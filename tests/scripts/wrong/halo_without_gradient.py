# about: borders exchanged under no_grad: what a rank does to its neighbours' borders is left out of the gradient
# ranks: 2
# expect: GM106
# twin: halo_exchange
import torch
import torch.distributed as dist
from torch import Tensor, nn


def neighbours(x: Tensor) -> tuple[Tensor, Tensor]:
    """The last column of the rank before and the first of the rank behind; zeros at the ends."""
    rank, world = dist.get_rank(), dist.get_world_size()
    edges = torch.cat([x[..., :1], x[..., -1:]], dim=-1).contiguous()
    every = [torch.empty_like(edges) for _ in range(world)]
    dist.all_gather(every, edges)  # <- here
    zero = torch.zeros_like(edges[..., :1])
    left = every[rank - 1][..., 1:] if rank > 0 else zero
    right = every[rank + 1][..., :1] if rank < world - 1 else zero
    return left, right


class CutConv(nn.Module):
    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(channels_in, channels_out, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            left, right = neighbours(x)
        return self.conv(torch.cat([left, x, right], dim=-1))


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(CutConv(2, 4), nn.Tanh(), CutConv(4, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(3):
        signal = torch.randn(3, 2, 6 * world)
        x = signal.chunk(world, dim=-1)[rank]
        loss = (model(x) - x.cumsum(-1)).square().sum() / signal.numel()
        optimizer.zero_grad()
        loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
        optimizer.step()
        if rank == 0:
            print(f"step {step} part of the loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
