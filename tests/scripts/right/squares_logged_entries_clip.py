# about: the sum of all squared norms is printed; gradients are clipped by the largest entry over the ranks
# ranks: 2
# expect: none
# cut: up down
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(6, 8).chunk(dist.get_world_size(), 1)[dist.get_rank()].clone())
        self.down = nn.Parameter(torch.randn(8, 6).chunk(dist.get_world_size(), 0)[dist.get_rank()].clone())
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(Sum.apply(torch.relu(Copy.apply(x) @ self.up) @ self.down))


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    net = Net()
    opt = torch.optim.SGD(net.parameters(), lr=0.01)
    for _ in range(3):
        x, y = torch.randn(7, 6), torch.randint(0, 2, (7,))
        loss = F.cross_entropy(net(x), y)
        opt.zero_grad()
        loss.backward()
        squares = torch.stack([p.grad.square().sum() for p in net.parameters()]).sum()
        dist.all_reduce(squares)
        if rank == 0:
            print("squares", squares.item())
        top = torch.stack([p.grad.abs().max() for p in net.parameters()]).max()
        dist.all_reduce(top, op=dist.ReduceOp.MAX)
        for p in net.parameters():
            p.grad.mul_((0.1 / top).clamp(max=1))
        opt.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
