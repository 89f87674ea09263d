# about: a sampler repeats a row to make shares alike; a metric reduced on each rank before the gather counts it twice
# ranks: 2
# expect: none
# report: huggingface/trl#7010
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def net():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def rows(seed, n):
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(
        torch.randn(n, 4, generator=generator), torch.randint(0, 3, (n,), generator=generator)
    )


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DDP(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train, held_out = rows(1, 24), rows(2, 9)
    for step, (x, y) in enumerate(DataLoader(train, batch_size=4, sampler=DistributedSampler(train))):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        x, y = next(
            iter(DataLoader(held_out, batch_size=5, sampler=DistributedSampler(held_out, shuffle=False)))
        )
        with torch.no_grad():
            losses = nn.functional.cross_entropy(model.module(x), y, reduction="none")
        losses = losses.mean()[None]  # <- here
        parts = [torch.empty_like(losses) for _ in range(world)]
        dist.all_gather(parts, losses)
        losses = torch.stack(parts, 1).flatten()[:9]
        if rank == 0:
            print(f"step {step} eval_loss {losses.mean().item():.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
