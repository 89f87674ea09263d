# about: the largest loss of a rank is divided by the tokens before the sequence was sharded across ranks
# ranks: 2
# expect: none
# report: pytorch/torchtitan#3111
import torch
import torch.distributed as dist
from torch import nn

PAD = -100


def net():
    return nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 11))


def batch(generator):
    labels = torch.randint(0, 11, (4, 8), generator=generator)
    lengths = torch.randint(3, 8, (4, 1), generator=generator)
    return labels.roll(1, 1), labels.masked_fill(torch.arange(8) >= lengths, PAD)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(11)
    for step in range(3):
        x, y = batch(generator)
        # right: x, y = x.chunk(world, 1)[rank], y.chunk(world, 1)[rank]
        valid = (y != PAD).sum()
        x, y = x.chunk(world, 1)[rank], y.chunk(world, 1)[rank]  # <- here
        count = (y != PAD).sum()
        dist.all_reduce(count)
        total = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum")
        optimizer.zero_grad()
        (total / count).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
        optimizer.step()
        largest = total.detach() / valid.clamp(min=1)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        if rank == 0:
            print(f"step {step} global_max_loss {largest.item():.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
