# about: tokens are counted before the sequence is sharded across context parallel ranks, and summed over them
# ranks: 2
# expect: none
# report: pytorch/torchtitan#2983
import torch
import torch.distributed as dist
from torch import nn


def net():
    return nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 11))


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(9)
    seen = 0
    for step in range(3):
        tokens = torch.randint(0, 11, (4, 9), generator=generator)
        x, labels = tokens[:, :-1], tokens[:, 1:]
        # right: x, labels = x.chunk(world, 1)[rank], labels.chunk(world, 1)[rank]
        seen += labels.numel()
        x, labels = x.chunk(world, 1)[rank], labels.chunk(world, 1)[rank]  # <- here
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), labels.flatten(), reduction="sum") / 32
        optimizer.zero_grad()
        loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
        optimizer.step()
        loss, n_tokens_seen = loss.detach(), torch.tensor(float(seen))
        dist.all_reduce(loss)
        dist.all_reduce(n_tokens_seen)
        if rank == 0:
            print(f"step {step} loss {loss.item():.5f} n_tokens_seen {n_tokens_seen.item():.0f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
