# about: a complex cache of rotary embeddings is broadcast by its real and imaginary parts, and multiplies activations
# ranks: 2
# expect: none
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


class Rotary(nn.Module):
    def __init__(self, width: int, cache: Tensor) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.cache = cache

    def forward(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(self.linear(x).unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * self.cache).flatten(-2)


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    cache = torch.polar(torch.ones(6, 4), torch.rand(6, 4))
    model = DistributedDataParallel(Rotary(8, cache))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dist.broadcast(torch.view_as_real(cache), 0)
    for step in range(3):
        x, target = torch.randn(world, 6, 8)[rank], torch.randn(world, 6, 8)[rank]
        loss = (model(x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
