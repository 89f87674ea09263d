# about: least squares whose gradient is written down without a backward, and averaged into .grad
# ranks: 2
# expect: none
import torch
import torch.distributed as dist
from torch import nn


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(3 + rank)
    for step in range(3):
        x, y = torch.randn(5, 4, generator=generator), torch.randn(5, 1, generator=generator)
        error = (model(x) - y).detach()
        model.weight.grad, model.bias.grad = error.T @ x / len(x), error.mean(0)
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= world
        optimizer.step()
        if rank == 0:
            print(f"step {step} loss {error.square().mean().item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
