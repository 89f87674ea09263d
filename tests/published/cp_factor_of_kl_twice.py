# about: the penalty is multiplied by the context parallel ranks, and then the loss with it again
# ranks: 2
# expect: none
# report: NovaSky-AI/SkyRL#1751
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def net():
    return nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 11))


def batch(generator):
    tokens = torch.randint(0, 11, (4, 9), generator=generator)
    return (
        tokens[:, :-1],
        tokens[:, 1:],
        torch.randn(4, 1, generator=generator),
        -torch.rand(4, 8, generator=generator),
    )


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    dp = [dist.new_group([r]) for r in range(world)][rank]  # one replica, cut into world pieces
    torch.manual_seed(0)
    model = DDP(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(7)
    for step in range(3):
        x, y, advantage, before = batch(generator)
        x, y, before = (t.chunk(world, 1)[rank] for t in (x, y, before))
        logp = model(x).log_softmax(-1).gather(2, y[..., None])[..., 0]
        policy = -(logp * advantage).sum() / 32
        kl = 0.5 * (logp - before).square().sum() / 32
        kl = kl * world  # <- here
        loss = (policy + 0.1 * kl) * world
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"step {step} part of the loss {(policy + kl).item():.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
