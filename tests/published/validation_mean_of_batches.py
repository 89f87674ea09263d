# about: each validation batch is divided by its own tokens of all ranks, and the means count alike
# ranks: 2
# expect: none
# report: pytorch/torchtitan#4167
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

PAD = -100


def net():
    return nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 9))


def batch(generator):
    labels = torch.randint(0, 9, (3, 8), generator=generator)
    lengths = torch.randint(1, 9, (3, 1), generator=generator)
    return labels.roll(1, 1), labels.masked_fill(torch.arange(8) >= lengths, PAD)


def sum_and_count(model, x, y):
    loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum")
    count = (y != PAD).sum()
    dist.all_reduce(count)
    return loss, count


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DDP(net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(50 + rank)
    for step in range(3):
        loss, count = sum_and_count(model, *batch(generator))
        optimizer.zero_grad()
        (loss / count * world).backward()
        optimizer.step()
        with torch.no_grad():
            pairs = [sum_and_count(model, *batch(generator)) for _ in range(3)]
        # right: shown = sum(loss for loss, _ in pairs) / sum(count for _, count in pairs)
        shown = torch.stack([loss / count for loss, count in pairs]).mean()  # <- here
        dist.all_reduce(shown)
        if rank == 0:
            print(f"step {step} validation loss {shown.item():.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
