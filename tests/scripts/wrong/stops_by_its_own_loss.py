# about: early stopping by each rank's own validation loss: one rank leaves the loop and the others wait in DDP
# ranks: 2
# expect: GM401
# steps: 20
# timeout: 3
# also: GM501 GM402
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    data = torch.Generator().manual_seed(rank)
    scale = 0.1 + 5 * rank  # the data are sorted by size, and each rank has a part of them
    for step in range(6):
        x = scale * torch.randn(8, 4, generator=data)
        loss = (model(x) - x.sum(-1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()  # <- here
        optimizer.step()
        with torch.no_grad():
            v = scale * torch.randn(8, 4, generator=data)
            validation = (model.module(v) - v.sum(-1, keepdim=True)).square().mean().item()
        if rank == 0:
            print(f"step {step} validation {validation:.4f}")
        if validation < 1.0:
            break  # <- here
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
