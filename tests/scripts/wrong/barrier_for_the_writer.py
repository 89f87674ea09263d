# about: rank 0 saves a checkpoint and calls a barrier that the others never reach
# ranks: 2
# expect: GM401
# twin: ema_and_schedule
# timeout: 3
import copy

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP


@torch.no_grad()
def evaluate(model: nn.Module, x: Tensor, y: Tensor) -> float:
    model.eval()
    counts = torch.tensor([(model(x).argmax(-1) == y).sum(), len(y)], dtype=torch.float)
    dist.all_reduce(counts)
    model.train()
    return (counts[0] / counts[1]).item()


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    ema = copy.deepcopy(net).requires_grad_(False)
    model = DDP(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=1),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4),
        ],
        milestones=[1],
    )
    x, y = torch.randn(12 * world, 4), torch.randint(0, 3, (12 * world,))
    x, y = x[rank::world], y[rank::world]
    for step in range(3):
        rows = slice(4 * step, 4 * step + 4)
        loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        with torch.no_grad():
            for p, average in zip(net.parameters(), ema.parameters(), strict=True):
                average.lerp_(p, 0.1)
        accuracy = evaluate(ema, x, y)
        if rank == 0:
            state = copy.deepcopy(net.state_dict())
            state.clear()
            dist.barrier()  # <- here
            print(f"step {step} loss {loss.item():.4f} accuracy {accuracy:.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
