# about: a micro-batch's mean over tokens is weighted by its share of the rows instead of the tokens
# ranks: 2
# expect: none
# report: verl-project/verl#5641
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

PAD = -100


def net():
    return nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 9))


def batch(generator, rows):
    labels = torch.randint(0, 9, (rows, 8), generator=generator)
    lengths = torch.randint(1, 9, (rows, 1), generator=generator)
    return labels.roll(1, 1), labels.masked_fill(torch.arange(8) >= lengths, PAD)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DDP(net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(40 + rank)
    for step in range(3):
        parts = [batch(generator, rows) for rows in (3, 2)]
        tokens = sum((y != PAD).sum() for _, y in parts)
        dist.all_reduce(tokens)
        optimizer.zero_grad()
        total = 0.0
        for i, (x, y) in enumerate(parts):
            model.require_backward_grad_sync = i == len(parts) - 1
            loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
            # right: share = (y != PAD).sum() * world / tokens
            share = len(y) / 5  # <- here
            (loss * share).backward()
            total += loss.item() * float(share)
        optimizer.step()
        if rank == 0:
            print(f"step {step} loss {total:.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
