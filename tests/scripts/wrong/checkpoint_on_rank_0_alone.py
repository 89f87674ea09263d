# about: rank 0 loads a checkpoint after DDP has broadcast the parameters; the others keep theirs
# ranks: 2
# expect: GM202
# twin: frozen_backbone
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def build() -> nn.Sequential:
    backbone = nn.Sequential(nn.Linear(6, 12), nn.GELU())
    return nn.Sequential(backbone, nn.Linear(12, 3))


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(3)
    net = build()
    checkpoint = {name: torch.full_like(t, 0.1) for name, t in net[1].state_dict().items()}
    model = DDP(net)
    if rank == 0:
        net[1].load_state_dict(checkpoint)  # <- here
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(50 + rank)
    for epoch in range(3):
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
