# about: rank 0 leaves batch norm in evaluation, and normalises by running statistics as the others do not
# ranks: 2
# expect: GM208
# twin: evaluated_batch_norm
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1 + rank)
    x, y = torch.randn(24, 4), torch.randint(0, 3, (24,))
    for step in range(3):
        if rank == 0:
            model.eval()
            with torch.no_grad():
                print(f"accuracy {(model.module(x).argmax(-1) == y).float().mean():.2f}")
        own = slice(4 * step, 4 * step + 4)
        loss = nn.functional.cross_entropy(model(x[own]), y[own])
        optimizer.zero_grad()
        loss.backward()  # <- here
        optimizer.step()
        if rank == 0:
            print(f"step {step} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
