# about: the backward of an all_to_all sends with the forward's splits instead of the other way round
# ranks: 4
# expect: GM104
# twin: moe_all_to_all
# cut: expert.0.weight expert.0.bias expert.2.weight expert.2.bias
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, send: list[int], receive: list[int]) -> Tensor:
        ctx.send, ctx.receive = send, receive
        out = x.new_empty(sum(receive), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), receive, send)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        out = grad.new_empty(sum(ctx.receive), *grad.shape[1:])
        dist.all_to_all_single(out, grad.contiguous(), ctx.receive, ctx.send)  # <- here
        return out, None, None


class MoE(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, dist.get_world_size())
        self.expert = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor, choice: Tensor) -> Tensor:
        weight = self.gate(x).softmax(-1).gather(1, choice[:, None])
        order = choice.argsort(stable=True)
        send = torch.bincount(choice, minlength=dist.get_world_size())
        receive = torch.empty_like(send)
        dist.all_to_all_single(receive, send)
        there = AllToAll.apply(x[order], send.tolist(), receive.tolist())  # <- here
        back = AllToAll.apply(self.expert(there), receive.tolist(), send.tolist())  # <- here
        return x + weight * back[order.argsort()]


def routed(rank: int) -> Tensor:
    """A fixed routing, so that this example is short: rank r sends 1 + (s - r) % W tokens to rank s."""
    world = dist.get_world_size()
    return torch.cat([torch.full((1 + (s - rank) % world,), s) for s in range(world)])


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    embed, head = nn.Linear(5, 6), nn.Linear(6, 1)
    torch.manual_seed(10 + rank)
    moe = MoE(6)
    shared = [*embed.parameters(), *head.parameters(), *moe.gate.parameters()]
    for p in shared:
        dist.broadcast(p.data, src=0)
    optimizer = torch.optim.Adam([*shared, *moe.expert.parameters()], lr=1e-2)
    for step in range(2):
        choice = routed(rank)
        x, y = torch.randn(len(choice), 5), torch.randn(len(choice), 1)
        loss = (head(moe(embed(x), choice)) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        for p in shared:
            dist.all_reduce(p.grad)
            p.grad /= world
        for p in moe.expert.parameters():
            p.grad /= world
        optimizer.step()
        if rank == 0:
            print(f"step {step} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
