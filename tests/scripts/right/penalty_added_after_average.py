# about: decay added to averaged gradients, and rows of weights projected onto the ball after the step
# ranks: 2
# expect: none
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
    opt = torch.optim.RMSprop(model.parameters(), lr=0.01)
    g = torch.Generator().manual_seed(rank)
    for _ in range(3):
        x, y = torch.randn(6, 4, generator=g), torch.randint(0, 2, (6,), generator=g)
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        for p in model.parameters():
            p.grad = p.grad.add(p.detach(), alpha=1e-3)
        opt.step()
        with torch.no_grad():
            for p in model.parameters():
                if p.dim() == 2:
                    p.div_(p.norm(dim=1, keepdim=True).clamp(min=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
