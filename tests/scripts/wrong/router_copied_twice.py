# about: probabilities are copied into the experts' region, and so is the gate's input before them
# ranks: 2
# expect: GM102
# also: GM103
# twin: moe_router_replicated
# cut: expert.0.weight expert.0.bias expert.2.weight expert.2.bias
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn


class CopyIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class SumOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class MoELayer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.gate = nn.Linear(width, dist.get_world_size(), bias=False)
        self.expert = nn.Sequential(nn.Linear(width, 8), nn.ReLU(), nn.Linear(8, width))

    def forward(self, x: Tensor) -> Tensor:
        h = CopyIn.apply(self.norm(x))  # <- here
        probs = CopyIn.apply(self.gate(h).softmax(-1))  # <- here
        out = self.expert(h) * probs[:, dist.get_rank()].unsqueeze(-1)
        return x + SumOut.apply(out)


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    embed, layer, head = nn.Embedding(10, 6), MoELayer(6), nn.Linear(6, 10)
    torch.manual_seed(100 + rank)
    for m in layer.expert:
        if isinstance(m, nn.Linear):
            m.reset_parameters()
    model = nn.ModuleList([embed, layer, head])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(5)
    for step in range(3):
        tokens = torch.randint(0, 10, (12,), generator=data)
        loss = F.cross_entropy(head(layer(embed(tokens[:-1]))), tokens[1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()  # <- here
        if rank == 0:
            print(f"step {step} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
