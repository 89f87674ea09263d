# about: a communication hook that after two steps sends gradients as small integers of one scale
# ranks: 2
# expect: none
# steps: 5
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

LEVELS, EXACT_STEPS = 63, 2


class Codes:
    def __init__(self) -> None:
        self.seen = 0
        self.residual: dict[int, Tensor] = {}


def coded(state: Codes, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
    world, own = dist.get_world_size(), bucket.buffer()
    state.seen += 1
    if state.seen <= EXACT_STEPS:
        first: Any = dist.all_reduce(own.div_(world), async_op=True)
        return first.get_future().then(lambda done: done.value()[0])
    value = own + state.residual.get(bucket.index(), torch.zeros_like(own))
    scale = value.abs().max().clamp(min=1e-12) / LEVELS
    dist.all_reduce(scale, dist.ReduceOp.MAX)
    codes = torch.round(value / scale)
    state.residual[bucket.index()] = value - codes * scale
    work: Any = dist.all_reduce(codes.to(torch.int32), async_op=True)
    return work.get_future().then(lambda done: done.value()[0].to(own.dtype) * (scale / world))


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1)))
    model.register_comm_hook(Codes(), coded)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(40 + rank)
    for step in range(5):
        x = torch.randn(8, 6, generator=generator)
        noise = torch.randn(8, 1, generator=generator) * (0.1 + rank)
        loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True) + noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"step {step} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
