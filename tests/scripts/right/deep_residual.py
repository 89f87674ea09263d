# about: a residual network of 24 blocks, whose paths are many more than its operators
# ranks: 2
# expect: none
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 8, bias=False) for _ in range(24)])
        self.out = nn.Linear(8, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.relu(block(x))
        return self.out(x)


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(Residual())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    generator = torch.Generator().manual_seed(10 + dist.get_rank())
    for _ in range(3):
        x, y = torch.randn(6, 8, generator=generator), torch.randint(3, (6,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
