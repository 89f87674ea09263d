# about: rank 0 alone calls a frozen copy of the model between steps
# ranks: 2
# expect: none
import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def net(hidden: int = 8) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, hidden), nn.ReLU(), nn.LayerNorm(hidden), nn.Linear(hidden, 3))


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = net()
    wrapped = DDP(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1 + rank)
    for step in range(3):
        x, y = torch.randn(4, 4), torch.randint(0, 3, (4,))
        loss = nn.functional.cross_entropy(wrapped(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            frozen = copy.deepcopy(model).requires_grad_(False).eval()
            print(f"step {step} loss {nn.functional.cross_entropy(frozen(x), y).item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
