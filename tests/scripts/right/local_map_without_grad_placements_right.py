# about: local_map over sharded experts gets the placement of the gradient of its replicated input, a pending sum
# ranks: 2
# expect: none
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import local_map


def experts(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    probs = (x @ gate.T).softmax(-1)
    return torch.einsum("te,ehk,ekw,th->tw", probs, up, down, x)


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    shapes = {"embed": (6, 4), "gate": (3, 6), "up": (3, 6, 8), "down": (3, 8, 6)}
    where = {"embed": [Replicate()], "gate": [Replicate()], "up": [Shard(2)], "down": [Shard(1)]}
    p = {k: nn.Parameter(distribute_tensor(torch.randn(s) / 2, mesh, where[k])) for k, s in shapes.items()}
    placements = [[Replicate()], [Replicate()], where["up"], where["down"]]
    grads = ([Partial()], [Partial()], where["up"], where["down"])
    layer = local_map(
        experts,
        out_placements=[Partial()],
        in_placements=placements,
        in_grad_placements=grads,
        device_mesh=mesh,
    )
    optimizer = torch.optim.SGD(p.values(), lr=0.1)
    for step in range(3):
        x, y = torch.randn(5, 4), torch.randn(5, 6)
        h = DTensor.from_local(x, mesh, [Replicate()]) @ p["embed"].t()
        out = h + layer(h, p["gate"], p["up"], p["down"]).redistribute(placements=[Replicate()])
        loss = (out.to_local() - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"step {step} loss {loss.item():.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
