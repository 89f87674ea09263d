# about: an adapter that the experts of all ranks share is drawn with a seed of each rank's own
# ranks: 2
# expect: GM202
# report: NVIDIA-NeMo/Megatron-Bridge#5396
import torch
import torch.distributed as dist
from torch import nn


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    base = nn.Linear(6, 6).requires_grad_(False)
    torch.manual_seed(100 + rank)
    down, up = nn.Linear(6, 2, bias=False), nn.Linear(2, 6, bias=False)
    nn.init.zeros_(up.weight)
    adapter = [*down.parameters(), *up.parameters()]
    optimizer = torch.optim.SGD(adapter, lr=0.5)
    for _ in range(3):
        x, y = torch.randn(5, 6), torch.randn(5, 6)
        loss = (base(x) + up(down(x)) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        for p in adapter:
            dist.all_reduce(p.grad)  # <- here
            p.grad /= world
        optimizer.step()  # <- here
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
