# about: a parameter that belongs to no wrapped module: DDP never sums its gradient
# ranks: 2
# expect: GM101
# twin: temperature_inside_ddp
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Encoder(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.proj = nn.Linear(6, width)

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(self.proj(x), dim=-1)


def train(rank: int) -> None:
    torch.manual_seed(7)
    encoder = DDP(Encoder())
    prototypes = nn.Parameter(torch.randn(4, 8))  # <- here
    temperature = nn.Parameter(torch.zeros(()))  # <- here
    optimizer = torch.optim.SGD([*encoder.parameters(), prototypes, temperature], lr=0.1)
    generator = torch.Generator().manual_seed(100 + rank)
    for step in range(3):
        x = torch.randn(5, 6, generator=generator)
        y = torch.randint(0, 4, (5,), generator=generator)
        logits = temperature.exp() * encoder(x) @ prototypes.T
        loss = F.cross_entropy(logits, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()  # <- here
        if rank == 0:
            print(f"step {step}: {loss.item():.4f}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train(dist.get_rank())
    dist.destroy_process_group()
