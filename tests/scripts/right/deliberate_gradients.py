# about: Functions and hooks with a gradient that is on purpose no derivative: scaled, reversed, straight through
# ranks: 2
# expect: none
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP


class GradMultiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


class Binarised(torch.autograd.Function):
    """Straight through where the operand is small."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * (x.abs() <= 1)


class AuxLoss(torch.autograd.Function):
    """Adds the gradient of another loss on the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        (loss,) = ctx.saved_tensors
        return grad, torch.full_like(loss, 0.3)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features, self.hidden = nn.Linear(5, 8), nn.Linear(8, 8)
        self.head, self.domain = nn.Linear(8, 1), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = GradMultiply.apply(self.features(x), 0.1)
        hidden = self.hidden(features)
        hidden.register_hook(lambda grad: grad.clamp(-0.05, 0.05))
        hidden = AuxLoss.apply(hidden, features.square().mean())
        return self.head(Binarised.apply(hidden)), self.domain(GradMultiply.apply(features, -1.0))


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1 + rank)
    for _ in range(2):
        x, y, domain = torch.randn(6, 5), torch.randn(6, 1), torch.rand(6, 1)
        guess, origin = model(x)
        loss = (guess - y).square().mean() + (origin - domain).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
