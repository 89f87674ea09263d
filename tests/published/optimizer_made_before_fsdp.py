# about: the optimizer is made before FSDP flattens the parameters, and steps tensors that no gradient reaches
# ranks: 2
# expect: GM103
# report: TrainCheck (AC-2665)
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


def net():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def batch(generator):
    return torch.randn(6, 4, generator=generator), torch.randint(0, 3, (6,), generator=generator)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = net()
    # right: model = FSDP(model, device_id=torch.device("cpu"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model = FSDP(model, device_id=torch.device("cpu"))  # <- here
    generator = torch.Generator().manual_seed(60 + rank)
    for step in range(3):
        x, y = batch(generator)
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"step {step} loss {loss.item():.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
