# about: an evolution strategy in which each rank follows the noise that it tried itself
# ranks: 2
# expect: GM201
# twin: evolution_strategy
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy


def noise(params: list[nn.Parameter], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(p.shape, generator=generator) for p in params]


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    params = list(model.parameters())
    x, y = torch.randn(16, 4), torch.randint(0, 3, (16,))
    with torch.no_grad():
        for step in range(4):
            print(f"step {step} loss {cross_entropy(model(x), y):.4f}")
            tried = [noise(params, world * step + at) for at in range(world)]
            for p, e in zip(params, tried[rank], strict=True):
                p.add_(e, alpha=0.1)
            rewards = [torch.zeros(()) for _ in range(world)]
            dist.all_gather(rewards, -cross_entropy(model(x), y))
            for p, e in zip(params, tried[rank], strict=True):
                p.sub_(e, alpha=0.1)
            every = torch.stack(rewards)
            gains = (every - every.mean()) / every.std()
            for p, e in zip(params, tried[rank], strict=True):
                p.add_(0.05 * gains[rank] * e)  # <- here
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
