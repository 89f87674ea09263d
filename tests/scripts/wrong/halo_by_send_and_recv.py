# about: borders exchanged by plain isend and irecv in the forward pass
# ranks: 2
# expect: GM106
# twin: halo_exchange
import torch
import torch.distributed as dist
from torch import Tensor, nn


def with_halo(x: Tensor) -> Tensor:
    rank, world = dist.get_rank(), dist.get_world_size()
    first, last = x[..., :1].contiguous(), x[..., -1:].contiguous()
    left, right = torch.zeros(first.shape), torch.zeros(last.shape)
    requests = []
    if rank > 0:
        requests += [dist.isend(first, rank - 1), dist.irecv(left, rank - 1)]  # <- here
    if rank < world - 1:
        requests += [dist.isend(last, rank + 1), dist.irecv(right, rank + 1)]  # <- here
    for request in requests:
        request.wait()
    return torch.cat([left, x, right], dim=-1)


class CutConv(nn.Module):
    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(channels_in, channels_out, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(with_halo(x))  # <- here


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
