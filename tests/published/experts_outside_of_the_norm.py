# about: the norm of the gradients takes what is not tensor parallel from the first rank alone, each rank's own experts too
# ranks: 2
# expect: none
# report: NVIDIA/Megatron-LM#5916
import torch
import torch.distributed as dist
from torch import nn

EXPERTS, WIDTH = 4, 6


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
    experts = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH).chunk(world)[rank].clone())
    same = [*embed.parameters(), *gate.parameters()]
    optimizer = torch.optim.SGD([*same, experts], lr=0.1)
    for step in range(3):
        x, y = torch.randn(8, 4), torch.randn(8, WIDTH)
        h = embed(x)
        own = Copy.apply(gate(h).softmax(-1)).chunk(world, 1)[rank]
        out = Reduce.apply(torch.einsum("te,ehw,th->tw", own, experts, Copy.apply(h)))
        loss = (h + out - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        # right: counted = [*same, experts] if rank == 0 else [experts]
        counted = [*same, experts] if rank == 0 else []  # <- here
        norm = sum((p.grad.square().sum() for p in counted), torch.zeros(()))
        dist.all_reduce(norm)
        for p in [*same, experts]:
            p.grad *= min(1.0, 0.1 / norm.sqrt().item())
        optimizer.step()
        if rank == 0:
            print(f"step {step} loss {loss.item():.5f} grad_norm {norm.sqrt().item():.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
