# about: query, key and value of a cross attention are column-parallel over the data-parallel group, its output over the tensor-parallel one
# ranks: 4
# expect: GM202
# report: NVIDIA/Megatron-LM#7452 (6)
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def summed(x: Tensor, group: Any) -> Tensor:
    x = x.clone()
    dist.all_reduce(x, group=group)
    return x


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return summed(grad, ctx.group), None


class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        return summed(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class Column(nn.Module):
    def __init__(self, inputs: int, outputs: int, group: Any) -> None:
        super().__init__()
        self.group = group
        whole = torch.randn(outputs, inputs) / 2
        self.weight = nn.Parameter(whole.chunk(dist.get_world_size(group))[dist.get_rank(group)].clone())

    def forward(self, x: Tensor) -> Tensor:
        return Copy.apply(x, self.group) @ self.weight.T


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    tp = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    dp = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    torch.manual_seed(0)
    encoder, decoder = nn.Linear(4, 6), nn.Linear(4, 6)
    # right: query, key_value = Column(6, 8, tp), Column(6, 16, tp)
    query, key_value = Column(6, 8, dp), Column(6, 16, dp)  # <- here
    out = nn.Parameter((torch.randn(6, 8) / 2).chunk(2, 1)[rank % 2].clone())
    model = nn.ModuleList([encoder, decoder, query, key_value])
    parameters = [*model.parameters(), out]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    torch.manual_seed(1 + rank // 2)
    for _ in range(3):
        source, x, y = torch.randn(7, 4), torch.randn(5, 4), torch.randn(5, 6)
        h = decoder(x)
        k, v = key_value(encoder(source)).chunk(2, -1)
        seen = (query(h) @ k.T / 2).softmax(-1) @ v
        loss = (h + Reduce.apply(seen @ out.T, tp) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        for p in parameters:
            dist.all_reduce(p.grad, group=dp)
            p.grad /= 2
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
