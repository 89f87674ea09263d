# about: weight decay for the shards of FSDP2 parameters, the same on every rank
# ranks: 2
# expect: none
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard


def net(hidden: int = 8) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, hidden), nn.ReLU(), nn.LayerNorm(hidden), nn.Linear(hidden, 3))


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = net()
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    for step in range(3):
        x, y = torch.randn(4, 4) + rank, torch.randint(0, 3, (4,))
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"step {step} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
