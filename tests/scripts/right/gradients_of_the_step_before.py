# about: the reduction overlaps with the next forward and backward: each step uses the gradients of the one before
# ranks: 2
# expect: none
import torch
import torch.distributed as dist
from torch import Tensor, nn


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.3)
    generator = torch.Generator().manual_seed(30 + rank)
    pending: tuple[Tensor, dist.Work | None] | None = None
    for step in range(6):
        x, y = torch.randn(8, 6, generator=generator), torch.randint(0, 3, (8,), generator=generator)
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        own = [p.grad for p in parameters]
        if pending is not None:
            flat, work = pending
            if work is not None:
                work.wait()
            parts = (flat / world).split([p.numel() for p in parameters])
            for p, part in zip(parameters, parts, strict=True):
                p.grad = part.view_as(p).clone()
            optimizer.step()
        flat = torch.cat([grad.reshape(-1) for grad in own if grad is not None])
        pending = flat, dist.all_reduce(flat, async_op=True)
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step} loss {loss.item():.4f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
