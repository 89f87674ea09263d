# about: a variational posterior whose divergence, the same on every rank, is divided by the size of the whole data set
# ranks: 2
# expect: none
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Posterior(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mean, self.log_variance = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        variance = self.log_variance.exp()
        return x @ self.mean, 0.5 * (self.mean.square() + variance - self.log_variance - 1).sum()


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(Posterior())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    xs, ys = torch.randn(30, 4, generator=generator), torch.randn(30, generator=generator)
    size = torch.tensor(float(len(xs)))
    dist.all_reduce(size)
    for x, y in zip(xs.split(10), ys.split(10), strict=True):
        predicted, divergence = model(x)
        loss = (predicted - y).square().mean() + divergence / size
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
