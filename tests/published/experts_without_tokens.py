# about: experts that got no token are skipped and have no gradient: neither their momentum nor their weights decay
# ranks: 2
# expect: none
# report: NVIDIA-NeMo/Automodel#2995 (3)
import torch
import torch.distributed as dist
from torch import nn

EXPERTS, WIDTH = 6, 6


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
    gate = nn.Linear(WIDTH, EXPERTS, bias=False)
    every = torch.randn(EXPERTS, WIDTH, WIDTH) / 2
    first = rank * EXPERTS // world
    experts = nn.ParameterList(w.clone() for w in every[first : first + EXPERTS // world])
    optimizer = torch.optim.AdamW([*gate.parameters(), *experts], lr=1e-2, weight_decay=0.1)
    for step in range(3):
        x, y = torch.randn(4, WIDTH), torch.randn(4, WIDTH)
        score, chosen = gate(x).softmax(-1).max(-1)
        score, tokens, out = Copy.apply(score), Copy.apply(x), torch.zeros(4, WIDTH)
        for i, weight in enumerate(experts):
            mine = (chosen == first + i).nonzero()[:, 0]
            if not len(mine):  # <- here
                continue  # <- here
            out = out.index_add(0, mine, tokens[mine] @ weight * score[mine, None])
        loss = (Reduce.apply(out) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"step {step} loss {loss.item():.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
