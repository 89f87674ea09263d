# about: rank 0 alone asks a copy of the model for the slope of its input, for a report
# ranks: 2
# expect: none
import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    model = DDP(net)
    probe = copy.deepcopy(net)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    g = torch.Generator().manual_seed(rank)
    for _ in range(3):
        x = torch.randn(8, 4, generator=g)
        opt.zero_grad()
        (model(x) - x.norm(dim=1, keepdim=True)).square().mean().backward()
        opt.step()
        if rank == 0:
            probe.load_state_dict(net.state_dict())
            seen = x.clone().requires_grad_()
            probe(seen).sum().backward()
            print("saliency", seen.grad.abs().mean().item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
