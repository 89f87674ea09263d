# about: labels are shifted before the sequence is sharded across ranks, and each rank shifts its part again
# ranks: 2
# expect: none
# report: modelscope/ms-swift#10185
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
        x, y = (t.chunk(world, 1)[rank] for t in batch(generator))
        logits = model(x)
        logits, y = logits[:, :-1], y[:, 1:]  # <- here
        count = (y != PAD).sum()
        dist.all_reduce(count)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum") / count
        optimizer.zero_grad()
        loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
        optimizer.step()
        shown = loss.detach()
        dist.all_reduce(shown)
        if rank == 0:
            print(f"step {step} loss {shown.item():.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
