# about: an average of the weights that starts from each rank's own seed, measured for the log alone
# ranks: 2
# expect: none
import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    ema = copy.deepcopy(net).requires_grad_(False)
    model = DDP(net)
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(4):
        x = torch.randn(8, 4)
        out = model(x)
        loss = (out - x.sum(1, keepdim=True)).square().mean()
        print("distance", F.mse_loss(out, ema(x)).item())
        opt.zero_grad()
        loss.backward()
        opt.step()
        with torch.no_grad():
            for e, p in zip(ema.parameters(), net.parameters(), strict=True):
                e.lerp_(p, 0.1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
