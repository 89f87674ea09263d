# about: attention in a ring over the sequence: gradients of keys and values are overwritten by the other rank's
# ranks: 2
# expect: GM104
# twin: ring_attention_keeps_one_part_right
# report: TTrace (13)
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def swap(x: Tensor) -> Tensor:
    other = torch.empty_like(x)
    works = [
        dist.P2POp(dist.isend, x.contiguous(), 1 - dist.get_rank()),
        dist.P2POp(dist.irecv, other, 1 - dist.get_rank()),
    ]
    for work in dist.batch_isend_irecv(works):
        work.wait()
    return other


class RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, kv: Tensor) -> Tensor:
        every = torch.cat((kv, swap(kv)))
        k, v = every.chunk(2, -1)
        probs = (q @ k.T / 2).softmax(-1)
        ctx.save_for_backward(q, k, v, probs)
        return probs @ v

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v, probs = ctx.saved_tensors
        grad_probs = grad @ v.T
        scores = probs * (grad_probs - (grad_probs * probs).sum(-1, keepdim=True)) / 2
        own, others = torch.cat((scores.T @ q, probs.T @ grad), -1).chunk(2)
        grad_kv = own.clone()
        grad_kv.copy_(swap(others))  # <- here
        return scores @ k, grad_kv


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    embed, query, key_value, head = nn.Embedding(9, 6), nn.Linear(6, 4), nn.Linear(6, 8), nn.Linear(4, 9)
    parameters = [*nn.ModuleList([embed, query, key_value, head]).parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    for _ in range(3):
        tokens = torch.randint(0, 9, (13,))
        x, y = tokens[:-1].chunk(world)[rank], tokens[1:].chunk(world)[rank]
        h = embed(x)
        loss = nn.functional.cross_entropy(head(RingAttention.apply(query(h), key_value(h))), y)
        optimizer.zero_grad()
        loss.backward()
        for p in parameters:
            dist.all_reduce(p.grad)
            p.grad /= world
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
