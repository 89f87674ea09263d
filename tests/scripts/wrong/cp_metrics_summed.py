# about: every context parallel rank has the whole loss, and the metric is summed over them too
# ranks: 2
# expect: GM112
# twin: cp_metrics_of_one_group
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad.chunk(dist.get_world_size(), 1)[dist.get_rank()].clone()


def net() -> nn.Module:
    return nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 11))


def batch(generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    tokens = torch.randint(0, 11, (4, 9), generator=generator)
    return tokens[:, :-1], tokens[:, 1:], torch.randn(4, 1, generator=generator)


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(6)
    for step in range(3):
        x, y, advantage = batch(generator)
        logp = model(x.chunk(world, 1)[rank]).log_softmax(-1)
        logp = Gather.apply(logp.gather(2, y.chunk(world, 1)[rank][..., None])[..., 0])
        loss = -(logp * advantage).sum() / logp.numel()
        optimizer.zero_grad()
        loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
        optimizer.step()
        shown = loss.detach().clone()
        dist.all_reduce(shown)  # <- here
        if rank == 0:
            print(f"step {step} policy_loss {shown.item():.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
