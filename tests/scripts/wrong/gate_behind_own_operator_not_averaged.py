# about: a gate behind an operator that the script registers is left out of the mean of the gradients
# ranks: 2
# expect: GM101
# twin: operators_of_the_script
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


@torch.library.custom_op("script::shift_", mutates_args={"x"})
def shift_(x: Tensor, by: float) -> None:
    x.add_(by)


@torch.library.custom_op("script::gated", mutates_args=())
def gated(x: Tensor, gate: Tensor) -> Tensor:
    return x * torch.sigmoid(gate)  # <- here


def keep(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    x, gate = ctx.saved_tensors
    opened = torch.sigmoid(gate)
    return grad * opened, (grad * x * opened * (1 - opened)).sum(0)


gated.register_autograd(backward, setup_context=keep)


@torch.library.custom_op("script::rounded", mutates_args=())
def rounded(x: Tensor) -> Tensor:
    return torch.round(x, decimals=1)


rounded.register_autograd(lambda ctx, grad: grad)  # as if it had not been rounded


class Gated(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.gate = nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        shift_(x, 0.5)
        return gated(rounded(self.linear(x)), self.gate)  # <- here


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Gated(6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        x, target = torch.randn(world, 4, 6)[rank], torch.randn(world, 4, 6)[rank]
        loss = (model(x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()  # <- here
        for p in model.linear.parameters():
            dist.all_reduce(p.grad)
            p.grad.div_(world)
        optimizer.step()  # <- here
        print(f"step {step} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
