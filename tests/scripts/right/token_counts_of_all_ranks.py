# about: context-parallel ranks divide by the number of valid tokens of all of them, against the average over them
# ranks: 2
# expect: none
import torch
import torch.distributed as dist
from torch import nn


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 9))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        tokens = torch.randint(0, 9, (3, 8))
        mask = (torch.arange(8) < 6).float().expand(3, 8)
        mine = slice(rank * 8 // world, (rank + 1) * 8 // world)
        logits = model(tokens[:, mine])
        losses = nn.functional.cross_entropy(
            logits.flatten(0, 1), tokens.roll(-1, 1)[:, mine].flatten(), reduction="none"
        )
        local = mask[:, mine].flatten()
        count = local.sum()
        dist.all_reduce(count)
        loss = world * (losses * local).sum() / count
        optimizer.zero_grad()
        loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= world
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
