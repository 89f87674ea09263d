# about: the last layer's gradients are taken away at first, others are scaled out of place
# ranks: 2
# expect: none
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1 + rank)
    for step in range(2):
        x = torch.randn(4, 6)
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        first, last = model.module[0], model.module[2]
        first.weight.grad = first.weight.grad * 0.5
        if step == 0:
            for p in last.parameters():
                p.grad = None
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
