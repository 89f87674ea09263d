# about: gradients are averaged largest first, and which is largest differs from rank to rank
# ranks: 2
# expect: GM401
# twin: hand_averaged
# timeout: 3
# also: GM501
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as distnn
from torch import Tensor, nn


class GlobalBatchNorm(nn.Module):
    """Batch norm with statistics of the whole batch, by sums over the ranks."""

    def __init__(self, width: int, momentum: float = 0.1, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.register_buffer("running_mean", torch.zeros(width))
        self.register_buffer("running_var", torch.ones(width))
        self.momentum, self.eps = momentum, eps

    def forward(self, x: Tensor) -> Tensor:
        world = dist.get_world_size()
        moments = torch.cat([x.mean(0), x.square().mean(0)])
        mean, square = (distnn.all_reduce(moments) / world).chunk(2)
        var = square - mean.square()
        with torch.no_grad():
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(var, self.momentum)
        return (x - mean) * torch.rsqrt(var + self.eps) * self.weight + self.bias


def average_gradients(model: nn.Module) -> None:
    for p in sorted(model.parameters(), key=lambda p: -float(p.grad.norm())):  # <- here
        dist.all_reduce(p.grad, op=dist.ReduceOp.SUM)  # <- here
        p.grad /= dist.get_world_size()


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(6, 10), GlobalBatchNorm(10), nn.ReLU(), nn.Linear(10, 1))
    for t in model.state_dict().values():
        dist.broadcast(t, src=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        x = torch.randn(8, 6)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        average_gradients(model)
        optimizer.step()
        if rank == 0:
            print(f"step {step} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
