# about: own rows in a gathered batch, a loss times the ranks against DDP's mean, a head outside of DDP that is divided
# ranks: 2
# expect: none
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP


def gathered(x: Tensor) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.detach())
    parts[dist.get_rank()] = x
    return torch.cat(parts)


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 6)))
    head = nn.Linear(6, 3, bias=False)
    head.weight.register_hook(lambda grad: grad / world)
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
    draws = torch.Generator().manual_seed(1 + rank)
    for _ in range(3):
        x, y = torch.randn(6, 8, generator=draws), torch.arange(6) % 3
        loss = F.cross_entropy(head(gathered(model(x))), y.repeat(world)) * world
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
