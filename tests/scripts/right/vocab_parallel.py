# about: cross entropy over a vocabulary cut over ranks, as one autograd Function with three reductions
# ranks: 2
# expect: none
# cut: head
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

VOCAB, WIDTH = 12, 8


class CopyToTensorParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor) -> Tensor:
        size = logits.shape[-1]
        start = dist.get_rank() * size
        top = logits.max(-1).values
        dist.all_reduce(top, op=dist.ReduceOp.MAX)
        logits = logits - top[:, None]
        outside = (target < start) | (target >= start + size)
        local = (target - start).masked_fill(outside, 0)
        predicted = logits.gather(1, local[:, None])[:, 0].masked_fill(outside, 0.0)
        dist.all_reduce(predicted)
        exp = logits.exp()
        total = exp.sum(-1)
        dist.all_reduce(total)
        exp.div_(
            total[:, None]
        )  # in place, as in Megatron: what `exp` itself keeps for backward is overwritten
        ctx.save_for_backward(exp, local, outside)
        return total.log() - predicted

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        softmax, local, outside = ctx.saved_tensors
        out = softmax.clone()
        rows = torch.arange(len(out))
        out[rows, local] -= (~outside).to(out.dtype)
        return out * grad[:, None], None


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        whole = torch.randn(VOCAB, WIDTH)
        self.head = nn.Parameter(whole.chunk(dist.get_world_size())[dist.get_rank()].clone())

    def forward(self, tokens: Tensor) -> Tensor:
        h = CopyToTensorParallel.apply(self.norm(self.embed(tokens)))
        return h @ self.head.T


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        tokens = torch.randint(0, VOCAB, (9,))
        loss = VocabParallelCrossEntropy.apply(model(tokens[:-1]), tokens[1:]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"step {step} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
