# about: data-parallel micro-batches: the loss is divided by their number and that of the ranks, and gradients are averaged over ranks
# ranks: 2
# expect: none
# report: TTrace (4)
import torch
import torch.distributed as dist
from torch import nn


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1 + rank)
    for _ in range(3):
        optimizer.zero_grad()
        for _ in range(3):
            x, y = torch.randn(6, 4), torch.randn(6, 2)
            loss = (model(x) - y).square().mean()
            # right: (loss / 3).backward()
            (loss / (3 * world)).backward()  # <- here
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= world
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
