"""What the programs that train share: a small model, the wrappers that are put around it, and its data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradmesh.verify import Shard
from tests.zoo.data import common

__all__ = ["CutMlp", "Towers", "batch", "ddp", "mlp", "row_losses", "target", "with_hooks"]

ROWS = 6


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


class CutMlp(nn.Module):
    """`mlp` of one rank of several: the columns of the first layer and the rows of the second, and a whole bias."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.columns = nn.Parameter(torch.empty(6 // ranks, 4).double())
        self.rows = nn.Parameter(torch.empty(2, 6 // ranks).double())
        self.bias = nn.Parameter(torch.empty(2).double())
        torch.manual_seed(0)
        for parameter in self.parameters():
            nn.init.normal_(parameter)


class Towers(nn.Module):
    """The two encoders of a contrastive model."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.image, self.text = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.image(x)), torch.tanh(self.text(y))


def batch(seed: int = 0, sizes: tuple[int, ...] | None = None) -> Shard:
    """Rows that are cut over the ranks."""
    return Shard(common(ROWS, 4, seed=seed), sizes=sizes, constant=True)


def target(sizes: tuple[int, ...] | None = None) -> Shard:
    """A target for each of them."""
    return Shard(common(ROWS, 2, seed=9), sizes=sizes, constant=True)


def row_losses(y: Tensor, wanted: Tensor) -> Tensor:
    """One loss for each row."""
    return F.smooth_l1_loss(y, wanted, reduction="none", beta=0.3).sum(1)


def ddp(module: nn.Module) -> nn.Module:
    return DistributedDataParallel(module)


def with_hooks(hook: Callable[[Tensor], Tensor], wrap: Callable[[Any], nn.Module] | None = None) -> Any:
    """What puts a hook on the gradient of every parameter, after a wrapper if there is one."""

    def parallel(module: nn.Module) -> nn.Module:
        made = module if wrap is None else wrap(module)
        for parameter in made.parameters():
            parameter.register_hook(hook)
        return made

    return parallel
