# about: a replicated DTensor weight taken by to_local() whose gradient is said to be a pending sum
# ranks: 2
# expect: none
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor


class RMSNorm(nn.Module):
    def __init__(self, width: int, mesh: DeviceMesh) -> None:
        super().__init__()
        self.weight = nn.Parameter(distribute_tensor(torch.ones(width), mesh, [Replicate()]))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.to_local(grad_placements=[Partial()])
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


class Block(nn.Module):
    def __init__(self, width: int, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh = mesh
        self.norm = RMSNorm(width, mesh)
        self.mix = nn.Parameter(distribute_tensor(torch.randn(width, width), mesh, [Shard(1)]))

    def forward(self, x: Tensor) -> Tensor:
        tokens = DTensor.from_local(self.norm(x), self.mesh, [Shard(0)])
        out = tokens.redistribute(placements=[Replicate()]) @ self.mix
        return out.redistribute(placements=[Shard(0)]).to_local()


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    model = Block(6, mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        x, y = torch.randn(4 * world, 6), torch.randn(4 * world, 6)
        out = model(x.chunk(world)[rank])
        loss = (out - y.chunk(world)[rank]).square().sum() / y.numel()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"step {step} part of the loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
