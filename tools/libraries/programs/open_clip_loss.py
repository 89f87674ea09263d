"""The losses of open_clip, as its training calls them; `gradients FILE` writes those of the first step."""

from __future__ import annotations

import os
import sys

import images  # noqa: F401 - before open_clip
import torch
import torch.distributed as dist
from open_clip.loss import ClipLoss, SigLipLoss
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

RANKS, ROWS = 2, 3
kind, *file = sys.argv[1:]
rank = int(os.environ.get("RANK", 0))
size = int(os.environ.get("WORLD_SIZE", 1))


class Towers(nn.Module):
    """Two linear towers."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = nn.Linear(6, 4), nn.Linear(5, 4)
        self.scale, self.bias = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.tensor(-1.0))

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, ...]:
        """Features, scale and bias."""
        features = [nn.functional.normalize(x, dim=-1) for x in (self.image(image), self.text(text))]
        return *features, self.scale.exp(), self.bias


def batch(step: int, of: int) -> tuple[Tensor, Tensor]:
    """The rows of a rank."""
    data = torch.Generator().manual_seed(10 * step + of)
    return torch.randn(ROWS, 6, generator=data), torch.randn(ROWS, 5, generator=data)


if kind.startswith("siglip"):
    loss_of = SigLipLoss(rank=rank, world_size=size, dist_impl="gather" if "gather" in kind else None)
else:
    loss_of = ClipLoss("local" in kind, "grad" in kind, rank=rank, world_size=size)
torch.manual_seed(0)
model: nn.Module = Towers()
if size > 1:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(1 if file else 2):
    parts = [batch(step, of) for of in ([rank] if size > 1 else range(RANKS))]
    image, text, scale, bias = model(*map(torch.cat, zip(*parts, strict=True)))
    loss = loss_of(image, text, scale, bias) if "siglip" in kind else loss_of(image, text, scale) + 0 * bias
    optimizer.zero_grad()
    loss.backward()
    if file:
        names = ((name.removeprefix("module."), p.grad) for name, p in model.named_parameters())
        torch.save({name: x for name, x in names if name != "bias"}, file[0])
    else:
        optimizer.step()
