# about: the backward of a ring shift hands the gradient on in the forward's direction
# ranks: 4
# expect: GM104
# twin: ring_states
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def shifted(x: Tensor, by: int) -> Tensor:
    """What the rank `by` places before this one holds; around the ring."""
    rank, world = dist.get_rank(), dist.get_world_size()
    out = torch.empty_like(x)
    ops = [
        dist.P2POp(dist.isend, x.contiguous(), (rank + by) % world),
        dist.P2POp(dist.irecv, out, (rank - by) % world),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return out


class FromPrevious(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return shifted(x, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return shifted(grad, 1)  # <- here


class Mixer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inp, self.carry, self.out = nn.Linear(3, width), nn.Linear(width, width), nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.inp(x))
        before = FromPrevious.apply(h.mean(dim=1))  # <- here
        return self.out(torch.tanh(h + self.carry(before)[:, None]))


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Mixer(6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        x, y = torch.randn(2, 4 * world, 3), torch.randn(2, 4 * world, 1)
        x, y = x.chunk(world, dim=1)[rank], y.chunk(world, dim=1)[rank]
        loss = (model(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad.div_(world)
        optimizer.step()
        if rank == 0:
            print(f"step {step} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
