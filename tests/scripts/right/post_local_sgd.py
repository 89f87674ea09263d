# about: PostLocalSGDOptimizer: gradients averaged at the first step, parameters every second step then
# ranks: 2
# expect: none
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 1)))
    alone, _ = dist.new_subgroups(1)
    model.register_comm_hook(PostLocalSGDState(None, alone, start_localSGD_iter=1), post_localSGD_hook)
    averager = PeriodicModelAverager(period=2, warmup_steps=1)
    opt = PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), averager)
    g = torch.Generator().manual_seed(rank)
    for _ in range(9):
        x = torch.randn(6, 4, generator=g)
        opt.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        opt.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
