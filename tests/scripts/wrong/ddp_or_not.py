# about: a helper hands out the wrapped model in one step and the bare one in the next
# ranks: 2
# expect: GM101
# twin: ddp_or_not_right
# report: TrainCheck (x-jxmnop-ddp-out-of-sync)
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def batch(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(6, 4, generator=generator), torch.randint(0, 3, (6,), generator=generator)


def model_for(step: int, wrapped: nn.Module) -> nn.Module:
    return wrapped if step % 2 else wrapped.module  # <- here


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(60 + rank)
    for step in range(3):
        x, y = batch(generator)
        loss = nn.functional.cross_entropy(model_for(step, model)(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"step {step} loss {loss.item():.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
