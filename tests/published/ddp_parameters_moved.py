# about: a wrapped model is converted there and back, which makes new parameters: DDP's hooks are on the old ones
# ranks: 2
# expect: GM101
# report: TrainCheck (pytorch-104336)
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def net():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def batch(generator):
    return torch.randn(6, 4, generator=generator), torch.randint(0, 3, (6,), generator=generator)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    torch.__future__.set_overwrite_module_params_on_conversion(True)  # as between devices
    model = net()
    # right: model.double().float()
    model = DDP(model)
    model.double().float()  # <- here
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
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
