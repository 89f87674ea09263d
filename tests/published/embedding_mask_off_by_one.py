# about: a vocabulary-parallel embedding masks the ids of other ranks, and the first of its own
# ranks: 2
# expect: none
# report: TTrace (1)
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class VocabularyParallelEmbedding(nn.Module):
    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        size = vocabulary // dist.get_world_size()
        self.start, self.end = dist.get_rank() * size, (dist.get_rank() + 1) * size
        self.weight = nn.Parameter(torch.randn(vocabulary, width)[self.start : self.end].clone())

    def forward(self, ids: Tensor) -> Tensor:
        # right: others = (ids < self.start) | (ids >= self.end)
        others = (ids <= self.start) | (ids >= self.end)  # <- here
        local = (ids - self.start).masked_fill(others, 0)
        return Reduce.apply(self.weight[local].masked_fill(others[:, None], 0.0))


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    embed = VocabularyParallelEmbedding(8, 6)
    norm, head = nn.LayerNorm(6), nn.Linear(6, 8)
    optimizer = torch.optim.SGD([*embed.parameters(), *norm.parameters(), *head.parameters()], lr=0.1)
    for _ in range(3):
        ids = torch.randint(0, 8, (20,))
        loss = nn.functional.cross_entropy(head(norm(embed(ids))), ids.roll(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
