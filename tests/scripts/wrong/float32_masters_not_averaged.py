# about: float32 copies of bfloat16 parameters get each rank's own gradient
# ranks: 2
# expect: GM101
# twin: float32_masters
import torch
import torch.distributed as dist
from torch import nn


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).bfloat16()
    masters = [p.detach().float().clone().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.SGD(masters, lr=0.1)
    torch.manual_seed(1 + rank)
    for _ in range(2):
        x = torch.randn(4, 6).bfloat16()
        loss = (model(x).float() - x.float().sum(1, keepdim=True)).square().mean()
        model.zero_grad()
        (1024 * loss).backward()
        for p, master in zip(model.parameters(), masters, strict=True):
            master.grad = p.grad.float() / 1024
        optimizer.step()  # <- here
        with torch.no_grad():
            for p, master in zip(model.parameters(), masters, strict=True):
                p.copy_(master)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
