# about: the cross entropy of a split vocabulary, which overwrites the logits, behind a norm of split tokens
# ranks: 2
# expect: none
# cut: head
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        total = gradient.clone()
        dist.all_reduce(total)
        return total.chunk(dist.get_world_size())[dist.get_rank()]


class CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        most = logits.amax(-1)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        logits -= most.unsqueeze(-1)
        first = dist.get_rank() * logits.shape[-1]
        elsewhere = (targets < first) | (targets >= first + logits.shape[-1])
        own = (targets - first).masked_fill(elsewhere, 0)
        flat = logits.view(-1, logits.shape[-1])
        chosen = flat[torch.arange(len(flat)), own].clone()
        chosen[elsewhere] = 0.0
        dist.all_reduce(chosen)
        torch.exp(logits, out=logits)
        total = logits.sum(-1)
        dist.all_reduce(total)
        loss = torch.log(total) - chosen
        logits.div_(total.unsqueeze(-1))
        ctx.save_for_backward(logits, elsewhere, own)
        return loss

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        softmax, elsewhere, own = ctx.saved_tensors
        softmax[torch.arange(len(own)), own] -= 1.0 - elsewhere.float()
        return softmax.mul_(gradient.unsqueeze(-1)), None


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        whole = torch.randn(8, 6)
        self.head = nn.Parameter(whole.chunk(dist.get_world_size())[dist.get_rank()].clone())

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        h = Gather.apply(self.norm(x))
        return CrossEntropy.apply(h @ self.head.t(), targets).mean()


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        x, targets = torch.randn(4 * world, 6), torch.randint(0, 8, (4 * world,))
        optimizer.zero_grad()
        model(x.chunk(world)[rank], targets).backward()
        for parameter in model.norm.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
