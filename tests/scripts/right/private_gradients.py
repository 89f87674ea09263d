# about: per-sample gradients by torch.func, clipped and summed over the ranks, with noise from one seed
# ranks: 2
# expect: none
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap


def clipped_sums(model: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
    weights = {name: p.detach() for name, p in model.named_parameters()}

    def loss(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return (functional_call(model, weights, (x,)) - y).square().sum()

    each = vmap(grad(loss), in_dims=(None, 0, 0))(weights, x, y)
    norms = torch.stack([g.flatten(1).norm(dim=1) for g in each.values()]).norm(dim=0)
    factor = (1.0 / norms).clamp(max=1)
    return [torch.einsum("n,n...->...", factor, g) for g in each.values()]


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = torch.Generator().manual_seed(1 + rank)
    noises = torch.Generator().manual_seed(1000)
    for _ in range(3):
        x, y = torch.randn(5, 4, generator=rows), torch.randn(5, 2, generator=rows)
        for p, total in zip(model.parameters(), clipped_sums(model, x, y), strict=True):
            dist.all_reduce(total)
            p.grad = (total + 0.5 * torch.randn(total.shape, generator=noises)) / (5 * world)
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
