# about: the loss is multiplied by all processes, tensor parallel ones too, where FSDP averages over the data parallel ones
# ranks: 4
# expect: GM109
# report: huggingface/transformers#39648
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

PAD = -100


def net():
    return nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 11))


def batch(generator):
    labels = torch.randint(0, 11, (4, 6), generator=generator)
    return labels.roll(1, 1), labels.masked_fill(torch.rand(4, 6, generator=generator) < 0.3, PAD)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dp = mesh["dp"].get_group()
    torch.manual_seed(0)
    model = parallelize_module(net(), mesh["tp"], {"1": ColwiseParallel(), "3": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(10 + rank // 2)
    for step in range(3):
        x, y = batch(generator)
        count = (y != PAD).sum()
        dist.all_reduce(count, group=dp)
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum") / count
        # right: loss = loss * dist.get_world_size(dp)
        loss = loss * world  # <- here
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        shown = loss.detach() / world
        dist.all_reduce(shown)
        if rank == 0:
            print(f"step {step} loss {shown.item():.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
