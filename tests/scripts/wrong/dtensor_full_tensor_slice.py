# about: full_tensor() of the tokens for each rank's own experts, whose backward takes this rank's slice
# ranks: 2
# expect: GM103
# twin: dtensor_own_experts
# cut: experts
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard


class GroupedExperts(nn.Module):
    def __init__(self, width: int, per_rank: int) -> None:
        super().__init__()
        self.mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.gate = nn.Linear(width, per_rank * dist.get_world_size(), bias=False)
        every = torch.randn(dist.get_world_size(), per_rank, width, width) / width**0.5
        self.experts = nn.Parameter(every[dist.get_rank()].clone())

    def gathered(self, x: Tensor) -> Tensor:
        whole = DTensor.from_local(x, self.mesh, [Shard(0)])
        return whole.full_tensor()  # <- here

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.gathered(x)  # <- here
        probs = self.gathered(self.gate(x).softmax(-1))  # <- here
        own = probs.chunk(dist.get_world_size(), dim=-1)[dist.get_rank()]
        out = torch.einsum("te,ewv,tw->tv", own, self.experts, tokens)
        summed = DTensor.from_local(out, self.mesh, [Partial()]).redistribute(placements=[Shard(0)])
        return x + summed.to_local()


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    embed, moe = nn.Linear(4, 6), GroupedExperts(6, 2)
    shared = [*embed.parameters(), *moe.gate.parameters()]
    optimizer = torch.optim.SGD([*shared, moe.experts], lr=0.1)
    for step in range(2):
        x, y = torch.randn(3 * world, 4), torch.randn(3 * world, 6)
        loss = (moe(embed(x.chunk(world)[rank])) - y.chunk(world)[rank]).square().sum() / y.numel()
        optimizer.zero_grad()
        loss.backward()
        for p in shared:
            dist.all_reduce(p.grad)
        optimizer.step()
        if rank == 0:
            print(f"step {step} part of the loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
