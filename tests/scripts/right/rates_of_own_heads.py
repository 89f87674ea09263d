# about: every rank has a head of its own, with a learning rate and a schedule of its own, on a shared trunk
# ranks: 2
# expect: none
# cut: head.weight head.bias
import torch
import torch.distributed as dist
from torch import nn


class Net(nn.Module):
    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Linear(6, 8)
        torch.manual_seed(1 + rank)
        self.head = nn.Linear(8, 2 + rank)
        nn.init.normal_(self.head.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(torch.tanh(self.trunk(x)))
        return out


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = Net(rank)
    shared = torch.optim.SGD(model.trunk.parameters(), lr=0.1)
    own = torch.optim.AdamW(model.head.parameters(), lr=0.01 * (1 + rank), weight_decay=0.1 * rank)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(own, patience=0)
    for _ in range(3):
        x = torch.randn(8, 6)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        model.zero_grad()
        loss.backward()
        for p in model.trunk.parameters():
            dist.all_reduce(p.grad)
        shared.step()
        own.step()
        scheduler.step(loss.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
