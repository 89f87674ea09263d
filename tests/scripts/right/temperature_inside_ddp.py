# about: DDP over a module that holds encoder, prototypes and temperature
# ranks: 2
# expect: none
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Classifier(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.proj = nn.Linear(6, width)
        self.prototypes = nn.Parameter(torch.randn(4, 8))
        self.temperature = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        features = F.normalize(self.proj(x), dim=-1)
        return self.temperature.exp() * features @ self.prototypes.T


def train(rank: int) -> None:
    torch.manual_seed(7)
    model = DDP(Classifier())
    optimizer = torch.optim.SGD(
        [model.module.proj.weight, model.module.proj.bias, model.module.prototypes, model.module.temperature],
        lr=0.1,
    )
    generator = torch.Generator().manual_seed(100 + rank)
    for step in range(3):
        x = torch.randn(5, 6, generator=generator)
        y = torch.randint(0, 4, (5,), generator=generator)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"step {step}: {loss.item():.4f}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train(dist.get_rank())
    dist.destroy_process_group()
