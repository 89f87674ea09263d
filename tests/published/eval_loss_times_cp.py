# about: context parallelism cuts the training batch and not the evaluation batch: eval_loss is cp times itself
# ranks: 2
# expect: none
# report: huggingface/transformers#48167
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def net():
    return nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 11))


def cut(x):
    return x.chunk(dist.get_world_size(), dim=1)[dist.get_rank()]


def loss_of(model, x, y, items):
    return (
        F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum") / items * dist.get_world_size()
    )


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DDP(net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(3)
    for step in range(3):
        tokens = torch.randint(0, 11, (4, 9), generator=generator)
        x, y = cut(tokens[:, :-1]), cut(tokens[:, 1:])
        loss = loss_of(model, x, y, 32)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            tokens = torch.randint(0, 11, (4, 9), generator=generator)
            # right: x, y = cut(tokens[:, :-1]), cut(tokens[:, 1:])
            x, y = tokens[:, :-1], tokens[:, 1:]  # <- here
            eval_loss = loss_of(model, x, y, 32)
        dist.all_reduce(eval_loss)
        if rank == 0:
            print(f"step {step} eval_loss {eval_loss.item() / world:.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
