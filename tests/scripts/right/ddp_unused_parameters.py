# about: experts chosen by each rank's batch, so some get no gradient there: find_unused_parameters
# ranks: 2
# expect: none
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Tasks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 6)
        self.heads = nn.ModuleList(nn.Linear(6, 1) for _ in range(3))

    def forward(self, x: Tensor, task: int) -> Tensor:
        return self.heads[task](torch.relu(self.body(x)))


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(Tasks(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(70 + rank)
    for step in range(3):
        x = torch.randn(4, 4, generator=generator)
        loss = (model(x, (step + rank) % 3) - x.mean(-1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"step {step} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
