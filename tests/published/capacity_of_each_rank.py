# about: each rank takes the experts' capacity from its own tokens: all_to_all's buffers differ in size
# ranks: 2
# expect: GM501
# also: GM401
# report: TrainCheck (DS-5794, DS-6089)
import torch
import torch.distributed as dist
from torch import nn

WIDTH = 6


class AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x.contiguous())
        return out

    @staticmethod
    def backward(ctx, grad):
        return AllToAll.apply(grad)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    gate = nn.Linear(WIDTH, world, bias=False)
    experts = torch.randn(world, WIDTH, WIDTH)
    expert = nn.Parameter(experts[rank].clone())
    optimizer = torch.optim.SGD([*gate.parameters(), expert], lr=0.1)
    generator = torch.Generator().manual_seed(70 + rank)
    for step in range(3):
        x, y = torch.randn(8, WIDTH, generator=generator), torch.randn(8, WIDTH, generator=generator)
        score, chosen = gate(x).softmax(-1).max(-1)
        capacity = chosen.bincount(minlength=world).max()
        # right: dist.all_reduce(capacity, op=dist.ReduceOp.MAX)
        slots = torch.full((world, int(capacity)), len(x))
        for e in range(world):
            mine = (chosen == e).nonzero()[:, 0]
            slots[e, : len(mine)] = mine
        sent = torch.cat([x, x.new_zeros(1, WIDTH)])[slots]
        back = AllToAll.apply(AllToAll.apply(sent) @ expert)
        out = x.new_zeros(9, WIDTH).index_add(0, slots.flatten(), back.flatten(0, 1))[:8] * score[:, None]
        loss = (out - y).square().sum() / (16 * WIDTH)
        optimizer.zero_grad()
        loss.backward()
        dist.all_reduce(gate.weight.grad)
        optimizer.step()
        if rank == 0:
            print(f"step {step} part of the loss {loss.item():.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
