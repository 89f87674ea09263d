# about: gathered keys and values whose backward takes this rank's slice, though each rank has its own queries
# ranks: 2
# expect: GM105
# twin: context_parallel
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn


class GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, dim=1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.chunk(dist.get_world_size(), dim=1)[dist.get_rank()]  # <- here


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        k, v = GatherSequence.apply(k), GatherSequence.apply(v)  # <- here
        return x + self.out(F.scaled_dot_product_attention(q, k, v))


class LanguageModel(nn.Module):
    def __init__(self, vocab: int = 11, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.attention = Attention(width)
        self.head = nn.Linear(width, vocab)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.attention(self.embed(tokens)))


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = LanguageModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        tokens = torch.randint(0, 11, (2, 6 * world + 1))
        mask = (torch.rand(2, 6 * world) < 0.8).float()
        x, y, own = (t.chunk(world, dim=1)[rank] for t in (tokens[:, :-1], tokens[:, 1:], mask))
        losses = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="none")
        count = own.sum()
        dist.all_reduce(count)
        loss = (losses * own.flatten()).sum() / count
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
