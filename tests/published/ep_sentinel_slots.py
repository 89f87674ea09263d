# about: scores of other ranks' experts are zeroed in the forward pass alone: the router gets the gradient of their slots
# ranks: 2
# expect: none
# report: huggingface/transformers#48687
import torch
import torch.distributed as dist
from torch import nn

EXPERTS, TOP, WIDTH = 4, 2, 6


def all_reduced(x):
    dist.all_reduce(x := x.clone())
    return x


class Copy(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: x.clone())
    backward = staticmethod(lambda ctx, grad: all_reduced(grad))


class Reduce(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: all_reduced(x))
    backward = staticmethod(lambda ctx, grad: grad)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    embed, gate = nn.Linear(4, WIDTH), nn.Linear(WIDTH, EXPERTS, bias=False)
    experts = nn.Parameter((torch.randn(EXPERTS, WIDTH, WIDTH) / 2).chunk(world)[rank].clone())
    optimizer = torch.optim.SGD([*embed.parameters(), *gate.parameters(), experts], lr=0.1)
    first, local = rank * len(experts), len(experts)
    for step in range(3):
        x, y = torch.randn(8, 4), torch.randn(8, WIDTH)
        h = embed(x)
        scores, chosen = gate(h).softmax(-1).topk(TOP)
        own = (chosen >= first) & (chosen < first + local)
        # right: weights = Copy.apply(scores).masked_fill(~own, 0.0)
        weights = Copy.apply(scores)  # <- here
        with torch.no_grad():  # <- here
            weights.masked_fill_(~own, 0.0)  # <- here
        slots = experts[(chosen - first).clamp(0, local - 1)]
        out = torch.einsum("tk,tkhw,th->tw", weights, slots, Copy.apply(h))
        loss = (h + Reduce.apply(out) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"step {step} loss {loss.item():.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
