# about: MoCo: a momentum encoder's keys gathered without gradient into a queue that all ranks share
# ranks: 2
# expect: none
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP


@torch.no_grad()
def concat_all_gather(x: Tensor) -> Tensor:
    out = [torch.ones_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(out, x.contiguous())
    return torch.cat(out)


class MoCo(nn.Module):
    def __init__(
        self, width: int = 6, size: int = 16, momentum: float = 0.9, temperature: float = 0.2
    ) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(5, width), nn.Linear(5, width)
        self.key.load_state_dict(self.query.state_dict())
        self.key.requires_grad_(False)
        self.momentum, self.temperature = momentum, temperature
        self.register_buffer("queue", F.normalize(torch.randn(size, width)))
        self.at = 0

    @torch.no_grad()
    def update(self, keys: Tensor) -> None:
        keys = concat_all_gather(keys)
        self.queue[self.at : self.at + len(keys)] = keys
        self.at = (self.at + len(keys)) % len(self.queue)

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        q = F.normalize(self.query(one))
        with torch.no_grad():
            for p, k in zip(self.query.parameters(), self.key.parameters(), strict=True):
                k.lerp_(p, 1 - self.momentum)
            k = F.normalize(self.key(other))
        positive = (q * k).sum(-1, keepdim=True)
        negative = q @ self.queue.clone().T
        self.update(k)
        return torch.cat([positive, negative], dim=1) / self.temperature


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(MoCo())
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    generator = torch.Generator().manual_seed(rank)
    for step in range(3):
        x = torch.randn(4, 5, generator=generator)
        logits = model(x + 0.1 * torch.randn(4, 5, generator=generator), x)
        loss = F.cross_entropy(logits, torch.zeros(4, dtype=torch.long))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"step {step} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
