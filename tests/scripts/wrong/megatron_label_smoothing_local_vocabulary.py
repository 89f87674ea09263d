# about: label smoothing in a vocabulary-parallel cross entropy over each rank's own shard of the vocabulary
# ranks: 2
# expect: GM104
# report: NVIDIA/Megatron-LM#7452 (1)
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

VOCABULARY, WIDTH, SMOOTHING = 12, 6, 0.2


class CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        shard = logits.shape[-1]
        top = logits.max(-1).values
        dist.all_reduce(top, op=dist.ReduceOp.MAX)
        logits = logits - top[:, None]
        local = labels - dist.get_rank() * shard
        mine = (local >= 0) & (local < shard)
        target = torch.where(mine, logits.gather(1, local.clamp(0, shard - 1)[:, None])[:, 0], 0.0)
        exps = logits.exp()
        total = exps.sum(-1)
        dist.all_reduce(target)
        dist.all_reduce(total)
        softmax = exps.div_(total[:, None])
        ctx.save_for_backward(softmax, local.clamp(0, shard - 1), mine)
        loss = total.log() - target
        smoothing = SMOOTHING * shard / (shard - 1)
        return (1 - smoothing) * loss - smoothing * softmax.log().mean(-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        softmax, local, mine = ctx.saved_tensors
        shard = softmax.shape[-1]
        smoothing = SMOOTHING * shard / (shard - 1)
        out = softmax.clone()
        out[torch.arange(len(out)), local] -= (1 - smoothing) * mine
        return (out - smoothing / shard) * grad[:, None], None


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(4, WIDTH), nn.Tanh())
    head = nn.Parameter(torch.randn(VOCABULARY, WIDTH).chunk(world)[rank].clone())
    optimizer = torch.optim.SGD([*body.parameters(), head], lr=0.1)
    for _ in range(3):
        x, labels = torch.randn(5, 4), torch.randint(VOCABULARY, (5,))
        loss = CrossEntropy.apply(Copy.apply(body(x)) @ head.T, labels).mean()  # <- here
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
