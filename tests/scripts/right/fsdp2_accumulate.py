# about: FSDP2 with gradients synchronised at the last micro-batch alone
# ranks: 2
# expect: none
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    mesh = torch.distributed.init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(80 + rank)
    for step in range(2):
        optimizer.zero_grad()
        for micro in range(2):
            model.set_requires_gradient_sync(micro == 1)
            x = torch.randn(3, 6, generator=generator)
            y = torch.randint(0, 2, (3,), generator=generator)
            loss = nn.functional.cross_entropy(model(x), y) / 2
            loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"step {step} loss {2 * loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
