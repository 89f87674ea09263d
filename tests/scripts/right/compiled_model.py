# about: torch.compile around the model in DDP (backend eager, so that nothing has to be built)
# ranks: 2
# expect: none
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
    model = torch.compile(DDP(net), backend="eager")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    torch.manual_seed(30 + rank)
    for step in range(2):
        x, y = torch.randn(6, 5), torch.randn(6, 1)
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"step {step} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
