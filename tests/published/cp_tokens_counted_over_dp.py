# about: valid tokens are summed over the data parallel group alone, and each context parallel rank divides by its own
# ranks: 2
# expect: GM111
# report: verl-project/verl#5983
import torch
import torch.distributed as dist
from torch import nn

PAD = -100


def net():
    return nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 11))


def batch(generator):
    labels = torch.randint(0, 11, (4, 8), generator=generator)
    lengths = torch.randint(3, 9, (4, 1), generator=generator)
    return labels.roll(1, 1), labels.masked_fill(torch.arange(8) >= lengths, PAD)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    dp = [dist.new_group([r]) for r in range(world)][rank]  # one replica, cut into world pieces
    torch.manual_seed(0)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(5)
    for step in range(3):
        x, y = (t.chunk(world, 1)[rank] for t in batch(generator))
        count = (y != PAD).sum()
        # right: dist.all_reduce(count)
        dist.all_reduce(count, group=dp)  # <- here
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum") / count
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
