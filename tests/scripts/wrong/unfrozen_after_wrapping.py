# about: a backbone frozen when DDP wrapped it and thawed later: DDP has no hook on its parameters
# ranks: 2
# expect: GM101
# twin: frozen_backbone
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def build() -> nn.Sequential:
    backbone = nn.Sequential(nn.Linear(6, 12), nn.GELU())
    return nn.Sequential(backbone, nn.Linear(12, 3))


def set_trainable(module: nn.Module, flag: bool) -> None:
    for p in module.parameters():
        p.requires_grad_(flag)


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(3)
    net = build()
    set_trainable(net[0], False)
    model = DDP(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(50 + rank)
    for epoch in range(3):
        if epoch == 1:
            set_trainable(net[0], True)  # <- here
        x = torch.randn(8, 6, generator=generator)
        y = torch.randint(0, 3, (8,), generator=generator)
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()  # <- here
        if rank == 0:
            print(epoch, f"{loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
