# about: tokens are gathered for the experts with their gradient, the router's probabilities by a plain all_gather
# ranks: 2
# expect: GM106
# report: NVIDIA-NeMo/Automodel#2995
import torch
import torch.distributed as dist
from torch import nn

EXPERTS, WIDTH = 4, 6


def plain_gather(x):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts)


def reduced(x):
    dist.all_reduce(x := x.clone())
    return x.chunk(dist.get_world_size())[dist.get_rank()].clone()


class Gather(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: plain_gather(x))
    backward = staticmethod(lambda ctx, grad: reduced(grad))


class Scatter(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: reduced(x))
    backward = staticmethod(lambda ctx, grad: plain_gather(grad))


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    embed, gate = nn.Linear(4, WIDTH), nn.Linear(WIDTH, EXPERTS, bias=False)
    experts = nn.Parameter((torch.randn(EXPERTS, WIDTH, WIDTH) / 2).chunk(world)[rank].clone())
    shared = [*embed.parameters(), *gate.parameters()]
    optimizer = torch.optim.SGD([*shared, experts], lr=0.1)
    generator = torch.Generator().manual_seed(30 + rank)
    for step in range(3):
        x, y = torch.randn(5, 4, generator=generator), torch.randn(5, WIDTH, generator=generator)
        probs = gate(h := embed(x)).softmax(-1)
        balance = EXPERTS * probs.mean(0).square().sum()
        # right: every = Gather.apply(probs)
        every = plain_gather(probs)  # <- here
        own = every.chunk(world, 1)[rank]
        out = h + Scatter.apply(torch.einsum("te,ehk,th->tk", own, experts, Gather.apply(h)))
        loss = (out - y).square().sum() / (5 * WIDTH * world) + 0.01 * balance / world
        optimizer.zero_grad()
        loss.backward()
        for p in shared:
            dist.all_reduce(p.grad)
        optimizer.step()
        if rank == 0:
            print(f"step {step} part of the loss {loss.item():.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
