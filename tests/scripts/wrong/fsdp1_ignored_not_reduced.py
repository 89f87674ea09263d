# about: a position bias in FSDP1's ignored_modules: FSDP neither shards it nor averages its gradient
# ranks: 2
# expect: GM101
# twin: fsdp1
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

WIDTH, LENGTH = 8, 5


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(LENGTH, LENGTH))

    def forward(self, scores: Tensor) -> Tensor:
        return scores + self.bias


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 4)
        self.positions = Positions()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        weights = self.positions(q @ k.transpose(1, 2) / WIDTH**0.5).softmax(-1)
        return self.out((weights @ v).mean(1))


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    raw = Attention()
    model = FSDP(
        raw,
        ignored_modules=[raw.positions],  # <- here
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    generator = torch.Generator().manual_seed(1 + rank)
    for step in range(3):
        x = torch.randn(6, LENGTH, WIDTH, generator=generator)
        loss = F.cross_entropy(model(x), x[:, 0, :4].argmax(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()  # <- here
        if rank == 0:
            print(f"step {step} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
