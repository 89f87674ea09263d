# about: FSDP1 in shards of one rank: it falls back to NO_SHARD, and its two replicas are never averaged
# ranks: 2
# expect: GM101
# report: verl-project/verl#7493
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy


def net():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def batch(generator):
    return torch.randn(6, 4, generator=generator), torch.randint(0, 3, (6,), generator=generator)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    # right: mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("ddp", "fsdp"))
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("ddp", "fsdp"))  # <- here
    model = FSDP(
        net(),
        device_id=torch.device("cpu"),
        device_mesh=mesh,
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(60 + rank)
    for step in range(3):
        x, y = batch(generator)
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"step {step} loss {loss.item():.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
