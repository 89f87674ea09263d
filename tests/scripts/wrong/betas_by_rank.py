# about: rank 1's optimizer is built with other betas and another weight decay, by less than one step shows
# ranks: 2
# expect: GM206
# twin: ddp_plain
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 1)))
    options = {"betas": (0.9, 0.999), "weight_decay": 1e-4}
    if rank == 1:  # this host was started with an older configuration
        options = {"betas": (0.9, 0.99), "weight_decay": 2e-4}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **options)  # <- here
    torch.manual_seed(1 + rank)
    for step in range(2):
        x = torch.randn(8, 6)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()  # <- here
        if rank == 0:
            print(f"step {step} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
