# about: the gradient of a pending sum taken by to_local() is said to be Partial, and it is whole: it is doubled
# ranks: 2
# expect: GM102
# twin: partial_to_local_and_back_right
# report: pytorch/pytorch#172932
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    up = nn.Parameter(distribute_tensor(torch.randn(8, 4) / 2, mesh, [Shard(0)]))
    down = nn.Parameter(distribute_tensor(torch.randn(6, 8) / 3, mesh, [Shard(1)]))
    head = nn.Parameter(distribute_tensor(torch.randn(3, 6) / 2, mesh, [Replicate()]))
    optimizer = torch.optim.SGD([up, down, head], lr=0.1)
    for step in range(3):
        x, y = torch.randn(5, 4), torch.randn(5, 3)
        h = (DTensor.from_local(x, mesh, [Replicate()]) @ up.t()).relu()
        out = h @ down.t()
        out = out.to_local(grad_placements=[Partial()]) * 0.5  # <- here
        out = DTensor.from_local(out, mesh, [Partial()]).redistribute(placements=[Replicate()])
        loss = ((out @ head.t()).to_local() - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"step {step} loss {loss.item():.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
