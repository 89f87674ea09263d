# about: Langevin noise drawn from each rank's own generator after the averaged step
# ranks: 2
# expect: GM201
# twin: sgd_by_hand
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 1))
    params = list(model.parameters())
    generator = torch.Generator().manual_seed(rank)
    for step in range(3):
        x, y = torch.randn(5, 4, generator=generator), torch.randn(5, 1, generator=generator)
        loss = (model(x) - y).square().mean()
        for p in params:
            p.grad = None
        loss.backward()
        flat = parameters_to_vector(p.grad for p in params)
        dist.all_reduce(flat)
        flat /= world
        at = 0
        for p in params:
            p.data.add_(flat[at : at + p.numel()].view_as(p), alpha=-0.1)
            p.data.add_(torch.randn(p.shape, generator=generator), alpha=0.01)  # <- here
            at += p.numel()
        if rank == 0:
            print(f"step {step} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
