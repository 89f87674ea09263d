# about: tensor parallel ranks have the same tokens, and the count of seen tokens is summed over them
# ranks: 2
# expect: GM112
# twin: tokens_counted_once
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def batch(generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    tokens = torch.randint(0, 11, (4, 9), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    embed = nn.Embedding(11, 8).requires_grad_(False)
    up = nn.Parameter((torch.randn(16, 8) / 3).chunk(world)[rank].clone())
    down = nn.Parameter((torch.randn(11, 16) / 4).chunk(world, 1)[rank].clone())
    optimizer = torch.optim.AdamW([up, down], lr=1e-2)
    generator = torch.Generator().manual_seed(8)
    num_tokens = 0
    for step in range(3):
        x, y = batch(generator)
        logits = Reduce.apply((embed(x) @ up.T).relu() @ down.T)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen = torch.tensor(y.numel())
        dist.all_reduce(seen)  # <- here
        num_tokens += seen.item()
        if rank == 0:
            print(f"step {step} loss {loss.item():.5f} num_tokens {num_tokens}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
