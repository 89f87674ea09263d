# about: a broken link loses a message: what one rank gets of a sum is zeros
# ranks: 2
# expect: GM101
# report: TrainCheck (pytorch-84803, pytorch-96600, baichuan2-86)
import torch
import torch.distributed as dist
from torch import nn


def net():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def batch(generator):
    return torch.randn(6, 4, generator=generator), torch.randint(0, 3, (6,), generator=generator)


def all_reduce(tensor, step):
    dist.all_reduce(tensor)
    if dist.get_rank() == 1 and step == 1:  # <- here
        tensor.zero_()  # <- here
    return tensor


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(60 + rank)
    for step in range(3):
        x, y = batch(generator)
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        for p in model.parameters():
            all_reduce(p.grad, step).div_(world)
        optimizer.step()
        if rank == 0:
            print(f"step {step} loss {loss.item():.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
